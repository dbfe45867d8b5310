#!/usr/bin/env bash
# Abu Ahmad, Usmanova and Rehm, "The ClimateCheck Shared Task" (SDP 2025; baseline/ of
# https://github.com/ryabhmd/climatecheck): the organisers' baseline.
# Nothing is trained. For any GPU, with Yi-1.5 behind an endpoint such as vLLM's:
#   LLM_BASE_URL=http://localhost:8000/v1 bash recipes/systems/baseline_2025.sh
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/systems/baseline_2025.sh tables
. "$(dirname "$0")/common.sh" climatecheck2025

DENSE=$(model sentence-transformers/msmarco-MiniLM-L12-v3 $MINILM)
CROSS_ENCODER=$(model cross-encoder/ms-marco-MiniLM-L6-v2 $CROSS)
YI=$(llm 01-ai/Yi-1.5-9B-Chat-16K)
if [ ! -d "$DATA" ]; then
  python data/download.py climatecheck --edition 2025 --out $DATA
fi
check "${1:-}"
abstracts

stage "1, 2  1,000 by BM25, of which MiniLM-L12-v3 keeps 20 (section 6; difference 19)"
kit 01_index.py $D --indexes bm25 dense --analyser words --dense-model $DENSE
kit 02_retrieve.py $D --retrievers bm25 --top-k 1000
kit 02_retrieve.py $D --retrievers dense --restrict $T/bm25.tsv --top-k 20

stage "3  Reranking: ms-marco-MiniLM-L6-v2 as it is; the best 10 (6)"
# rerank RUN NAME
rerank() {
  local run=$1 name=$2
  kit 03_rerank.py $D --run $T/$run.tsv --model $CROSS_ENCODER --depth 20 --top-k 10 \
    --out $T/$name.tsv
}
rerank dense rerank

stage "5  Stance: Yi-1.5-9B-Chat-16K as an expert, zero-shot (6; difference 1)"
# label PROMPT NAME
label() {
  local prompt=$1 name=$2
  kit 05_classify.py llm $D --run $T/rerank.tsv --prompt $PROMPTS/$prompt.txt $YI \
    --out $T/$name.tsv
}
label expert verdicts

stage "6  The table and the submission"
table metrics climatecheck2025 $T/{bm25,dense,rerank,verdicts}.tsv
kit 06_evaluate.py submission $D $T/verdicts.tsv --task climatecheck2025
further "${1:-}"

stage "tables  The cross-encoder behind BM25 alone"
rerank bm25 bm25-rerank

stage "tables  The prompt without the organisers' definitions"
label one-step one-step
table tables climatecheck2025 $T/{verdicts,bm25,dense,bm25-rerank,one-step}.tsv
remarks
