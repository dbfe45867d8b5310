#!/usr/bin/env bash
# ClimateSense (https://github.com/climatesense-project/climatesense-climatecheck2026), best system
# of ClimateCheck 2026, task 1: Ant Bridge's retrieval, stance by an open language model. For one
# A100, with gpt-oss-120b behind an endpoint such as vLLM's:
#   LLM_BASE_URL=http://localhost:8000/v1 bash recipes/systems/climatesense_2026.sh
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/systems/climatesense_2026.sh tables
. "$(dirname "$0")/common.sh" climatecheck2026

LARGE=$(model BAAI/bge-reranker-large $CROSS)
RERANKER_M3=$(model BAAI/bge-reranker-v2-m3 $CROSS)
GPT_OSS=$(llm openai/gpt-oss-120b)
if [ ! -d "$DATA" ]; then
  python data/download.py climatecheck --edition 2026 --out $DATA
fi
check "${1:-}"
abstracts

stage "1, 2  BM25: the best 5,000; bge-reranker-large orders those of train (difference 21)"
kit 01_index.py $D --indexes bm25 --analyser letters
kit 02_retrieve.py $D --split train --retrievers bm25 --top-k ${DEPTH:-5000}
kit 02_retrieve.py $D --retrievers bm25 --top-k ${DEPTH:-5000}
kit 03_rerank.py $D --split train --run $WORK/train/bm25.tsv --model $LARGE \
  --depth ${DEPTH:-5000} --top-k 1000 --out $WORK/train/mined.tsv

# rerank NUMBER MODEL BATCH MARGIN: train a reranker, and keep its best 500
rerank() {
  local number=$1 model=$2 batch=$3 margin=$4
  kit recipes/train/reranker.py $D $WORK/train/triplets.jsonl --model $model --loss margin \
    --margin $margin --batch-size $batch --epochs 1 --lr 1e-5 --schedule constant \
    --seed $number --out $WORK/models/reranker-$number
  kit 03_rerank.py $D --model $WORK/models/reranker-$number --run $T/bm25.tsv \
    --depth ${DEPTH:-5000} --top-k 500 --out $T/rerank-$number.tsv
}

stage "3  Five BGE rerankers with margin loss, all trained on one file of triplets (difference 21)"
kit recipes/train/mine.py $D $WORK/train/mined.tsv --shape tuples --hard 5 --from-top 500 \
  --easy 10 --out $WORK/train/triplets.jsonl
rerank 1 $LARGE 8 0.2
rerank 2 $LARGE 16 0.2
rerank 3 $LARGE 8 0.25
rerank 4 $LARGE 16 0.25
rerank 5 $RERANKER_M3 16 0.2

stage "2  Reciprocal rank fusion of the five with k = 6; the best 10"
kit 02_retrieve.py fuse $D --rrf-k 6 --top-k 10 --out $T/rerank.tsv $T/rerank-{1,2,3,4,5}.tsv

stage "5  Stance: gpt-oss-120b, zero-shot, a label in JSON (difference 20)"
LABEL="--run $T/rerank.tsv --max-tokens 1024 $GPT_OSS"
kit 05_classify.py llm $D $LABEL --structured --prompt $PROMPTS/json.txt --out $T/verdicts.tsv

stage "6  The table and the submission"
table metrics climatecheck2026 $T/{bm25,rerank,verdicts}.tsv
kit 06_evaluate.py submission $D $T/verdicts.tsv --task climatecheck2026
further "${1:-}"

stage "tables  Fusion with k = 60; stance in two steps"
kit 02_retrieve.py fuse $D --rrf-k 60 --top-k 10 --out $T/rerank-k60.tsv $T/rerank-{1,2,3,4,5}.tsv
kit 05_classify.py llm $D $LABEL --strategy two-step \
  --prompt $PROMPTS/two-step-evidence.txt $PROMPTS/two-step-direction.txt --out $T/two-step.tsv
table tables climatecheck2026 $T/{verdicts,two-step,bm25}.tsv $T/rerank{-1,-2,-3,-4,-5,-k60,}.tsv
remarks
