# The steps of kvist_2026.sh, a function each. They take $PAPERS and $GEMMA from there.

# english SPLIT: its posts for BM25. French and German ones are cleaned, and their translation
# stands behind them.
english() {
  local split=$1
  local clean=$WORK/$split/claims.clean.tsv
  python recipes/rewrite.py $D --split $split --view clean --languages fr de --out $clean
  translate $split --claims $clean --append
  mkdir -p $WORK/english
  cp $DATA/corpus.jsonl $WORK/english
  cp $WORK/$split/claims.translation.tsv $WORK/english/claims.$split.tsv
}

# forest SPLIT: the run of the forest, which learns on train
forest() {
  local split=$1
  python recipes/tools/learn_fusion.py $D --split $split $WORK/train/{dense,bm25}.tsv \
    --qrels $DATA/qrels.train.tsv --test $WORK/$split/{dense,bm25}.tsv --seed 42 --top-k 30 \
    --out $WORK/$split/forest.tsv
}

# rerank SPLIT RUN NAME RERANKER: reorder the best 30 of a run
rerank() {
  local split=$1 run=$2 name=$3 reranker=$4 how
  case $reranker in
    nemotron) how="--base-url $RERANK_BASE_URL --model nvidia/llama-nemotron-rerank-1b-v2
      --extra {\"truncate_prompt_tokens\":2048}" ;;
    jina) how="--base-url $JINA_BASE_URL --model jinaai/jina-reranker-v3" ;;
    gemma) how="--model $GEMMA --max-length 1024" ;;
  esac
  kit 03_rerank.py $D --split $split --run $WORK/$split/$run.tsv --depth 30 $PAPERS \
    --out $WORK/$split/$name.tsv $how
}
