#!/usr/bin/env bash
# Retrix at CheckThat! 2026, task 1 (CLEF; https://github.com/n00bEngineer/clef2026_retrix): fifth.
# Which of 10,000 papers is a post in English, French or German about? For one A100, with peft; the
# data on request, translations from an endpoint; checkthat_2026_training.sh trains the reranker:
#   python data/download.py checkthat2026 --from FOLDER
#   LLM_BASE_URL=http://localhost:8000/v1 bash recipes/systems/checkthat_2026.sh
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/systems/checkthat_2026.sh tables
#   RERANKER=NAME   the reranker to start from (default: Alibaba-NLP/gte-reranker-modernbert-base)
#   EARLIER=FOLDER  posts of 2025, as data/download.py makes them (default: data/checkthat4b)
. "$(dirname "$0")/common.sh" checkthat2026

BGE_M3=$(model BAAI/bge-m3 $MINILM)
BGE=$(model BAAI/bge-large-en-v1.5 $MINILM)
TRANSLATOR=$(llm utter-project/EuroLLM-9B-Instruct-2512)
if [ ! -d "$DATA" ]; then
  python data/download.py checkthat2026 --out $DATA
fi
check "${1:-}"

stage "2  EuroLLM translates French and German posts into English (3.1; difference 31)"
translate test

stage "1, 2  Terms of near papers expand a post; BGE-M3 finds 2,000 (3.2, 3.3; differences 32, 33)"
kit 01_index.py $D --indexes dense --dense-model $BGE --out $WORK/index-bge \
  --query-prompt "Represent this sentence for searching relevant passages: "
kit 01_index.py $D --indexes dense --dense-model $BGE_M3 --max-length 1024

# retrieve SPLIT: the run of its expanded posts, dense.tsv
retrieve() {
  local split=$1
  local posts="$D --split $split --claims $WORK/$split/claims.translation.tsv"
  kit 02_retrieve.py $posts --index $WORK/index-bge --top-k 5 --out $WORK/$split/nearest
  python recipes/tools/expand.py $posts $WORK/$split/nearest/dense.tsv --papers 5 --terms 15
  kit 02_retrieve.py $D --split $split --claims $WORK/$split/claims.expanded.tsv --top-k 2000
}
retrieve test

stage "3  A reranker, fine-tuned on English posts, orders them (3.4, 3.5; differences 34 to 37)"
DATA=$DATA WORK=$WORK bash recipes/systems/checkthat_2026_training.sh

# rerank SPLIT NAME DEPTH FLAGS: reorder the run by the posts before their expansion
rerank() {
  local split=$1 name=$2 depth=$3
  shift 3
  kit 03_rerank.py $D --split $split --claims $WORK/$split/claims.translation.tsv \
    --run $WORK/$split/dense.tsv --depth $depth --top-k 100 --out $WORK/$split/$name.tsv "$@"
}
AUTHORS="--fields title,abstract,authors"
TRAINED="--model $WORK/models/reranker --max-length 512 $AUTHORS"
rerank test rerank ${DEPTH:-2000} $TRAINED

stage "6  The table and the submission"
MEASURES="MRR@5 R@100 MAP nDCG@5 nDCG@10 P@1"
table metrics "$MEASURES" $T/{dense,rerank}.tsv
kit 06_evaluate.py submission $D $T/rerank.tsv --task $(checkthat_task)
further "${1:-}"

stage "tables  Rerankers as they are, with and without authors; the fine-tuned one: the best 100"
GTE=$(model Alibaba-NLP/gte-reranker-modernbert-base $CROSS)
QWEN=$(model Qwen/Qwen3-Reranker-4B $CAUSAL)
ABOUT="Given a post on social media, find the scientific paper that it is about"
rerank test gte 100 --model $GTE --max-length 1024
rerank test gte-authors 100 --model $GTE --max-length 1024 $AUTHORS
rerank test qwen 100 --model $QWEN --max-length 512 --prompt "$ABOUT"
rerank test qwen-authors 100 --model $QWEN --max-length 512 --prompt "$ABOUT" $AUTHORS
rerank test rerank-100 100 $TRAINED
NEMOTRON=
if [ -n "${RERANK_BASE_URL:-}" ]; then
  SERVED="--base-url $RERANK_BASE_URL --model nvidia/llama-nemotron-rerank-1b-v2"
  rerank test nemotron 100 $SERVED
  rerank test nemotron-authors 100 $SERVED $AUTHORS
  NEMOTRON="$T/nemotron.tsv $T/nemotron-authors.tsv"
fi

stage "tables  Dev at depth 1,000; weights of BGE-M3 and reranker, fitted on it (difference 38)"
FITTED=
if [ -e $DATA/qrels.dev.tsv ]; then
  translate dev
  retrieve dev
  rerank dev rerank ${DEPTH:-1000} $TRAINED
  kit recipes/train/fit_fusion.py $D --split dev --measure MRR@5 $WORK/dev/{dense,rerank}.tsv
  FITTED=$T/fitted.tsv
  kit 02_retrieve.py fuse $D --fusion $WORK/dev/fusion.json $T/{dense,rerank}.tsv --out $FITTED
else
  echo "left out, as there is no $DATA/qrels.dev.tsv"
fi

stage "tables  All posts; those of each language, on test and dev"
ALL=($T/{dense,rerank,rerank-100}.tsv $FITTED $T/{gte,gte-authors,qwen,qwen-authors}.tsv $NEMOTRON)

# by_language SPLIT RUNS: a table of the runs for each language that has judgements
by_language() {
  local split=$1 language
  shift
  for language in en fr de; do
    if [ ! -e $WORK/languages/$language/qrels.$split.tsv ]; then
      continue
    fi
    python 06_evaluate.py --data $WORK/languages/$language --work $WORK --split $split "$@" \
      --measures $MEASURES --out $WORK/$split/$language.tsv
    python recipes/tools/published.py $WORK/$split/$language.json \
      "$SYSTEM:CheckThat! 2026, $split, $language"
  done
}
table tables "$MEASURES" "${ALL[@]}"
python recipes/tools/languages.py $DATA $WORK/languages
by_language test "${ALL[@]}"
by_language dev $WORK/dev/{dense,rerank}.tsv  # without a dev split, no language has a table
remarks
