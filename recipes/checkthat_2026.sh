#!/usr/bin/env bash
# Retrix at CheckThat! 2026, task 1 (CLEF; https://github.com/n00bEngineer/clef2026_retrix): fifth.
# Which of 10,000 papers is a post in English, French or German about? For one A100; the data on
# request, the translations from an endpoint; the reranker is trained by checkthat_2026_training.sh:
#   python data/download.py checkthat2026 --from FOLDER
#   LLM_BASE_URL=http://localhost:8000/v1 bash recipes/checkthat_2026.sh
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/checkthat_2026.sh tables
. "$(dirname "$0")/common.sh" checkthat2026

M3=$(model BAAI/bge-m3 $MINILM)
BGE=$(model BAAI/bge-large-en-v1.5 $MINILM)
EUROLLM=$(llm utter-project/EuroLLM-9B-Instruct-2512)
if [ ! -d "$DATA" ]; then
  python data/download.py checkthat2026 --out $DATA
fi
TASK=checkthat2026
DEV=dev
LANGUAGES="en fr de"
if [ ! -e $DATA/qrels.dev.tsv ]; then
  echo "no dev split: a rehearsal in one language, which ends with weights from the train split"
  TASK=checkthat4b
  DEV=train
  LANGUAGES=en
fi

stage "2  EuroLLM translates French and German posts into English (3.1; difference 32)"
# The posts of a split in English. What no reply can be read for is asked once more.
translate() {
  local split=$1 name round
  local view=$WORK/$split/claims.translation
  read -r _ _ _ name <<< "$EUROLLM"  # --backend WHAT --model NAME
  for round in 1 2 3; do
    if python recipes/rewrite.py $D --split $split --view translation --languages fr de \
      --model $name --max-tokens 256; then
      return
    fi
    python 04_llm_rerank.py ask $view.requests.jsonl --replies $view.replies.jsonl $EUROLLM
  done
  refuse "$view.replies.jsonl: the same requests wait again and again; see its last lines"
}
translate test

stage "1, 2  Terms of the five nearest papers expand a post (3.2; 33); BGE-M3 finds 2,000 (3.3; 34)"
kit 01_index.py $D --indexes dense --dense-model $BGE --out $WORK/index-bge \
  --query-prompt "Represent this sentence for searching relevant passages: "
kit 01_index.py $D --indexes dense --dense-model $M3 --max-length 1024

# The run of a split's expanded posts, dense.tsv
retrieve() {
  local split=$1
  local posts="$D --split $split --claims $WORK/$split/claims.translation.tsv"
  kit 02_retrieve.py $posts --index $WORK/index-bge --top-k 5 --out $WORK/$split/nearest
  python recipes/tools/expand.py $posts $WORK/$split/nearest/dense.tsv --papers 5 --terms 15
  kit 02_retrieve.py $D --split $split --claims $WORK/$split/claims.expanded.tsv --top-k 2000
}
retrieve test

stage "3  A reranker, fine-tuned on English posts, orders them (3.4, 3.5; differences 35 to 38)"
DATA=$DATA WORK=$WORK bash recipes/checkthat_2026_training.sh

# A run of posts as they were before the expansion
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
kit 06_evaluate.py submission $D $T/rerank.tsv --task $TASK
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

stage "tables  The dev split at depth 1,000; weights of BGE-M3 and reranker, fitted on it (39)"
translate $DEV
retrieve $DEV
rerank $DEV rerank ${DEPTH:-1000} $TRAINED
kit 02_retrieve.py fit $D --split $DEV --measure MRR@5 $WORK/$DEV/{dense,rerank}.tsv
kit 02_retrieve.py fuse $D --fusion $WORK/$DEV/fusion.json $T/{dense,rerank}.tsv \
  --out $T/fitted.tsv

stage "tables  All posts; those of each language, on test and dev"
ALL=($T/{dense,rerank,rerank-100,fitted,gte,gte-authors,qwen,qwen-authors}.tsv)

# A table of runs on a split for each language
by_language() {
  local split=$1 language
  shift
  for language in $LANGUAGES; do
    python 06_evaluate.py --data $WORK/languages/$language --work $WORK --split $split "$@" \
      --measures $MEASURES --out $WORK/$split/$language.tsv
    python recipes/tools/published.py $WORK/$split/$language.json \
      "$SYSTEM:CheckThat! 2026, $split, $language"
  done
}
table tables "$MEASURES" "${ALL[@]}"
python recipes/tools/languages.py $DATA $WORK/languages
by_language test "${ALL[@]}"
by_language $DEV $WORK/$DEV/{dense,rerank}.tsv
remarks
