#!/usr/bin/env bash
# Wang et al., "Winning ClimateCheck: A Multi-Stage System with BM25, BGE-Reranker Ensembles, and
# LLM-based Analysis" (SDP 2025; https://github.com/cklcklckl/climatecheck_1st_solution):
# Ant Bridge, first in both subtasks of ClimateCheck 2025.
# For one A100; Gemini at its own endpoint:
#   export LLM_BASE_URL=https://generativelanguage.googleapis.com/v1beta/openai/ OPENAI_API_KEY=...
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/systems/ant_bridge.sh tables
. "$(dirname "$0")/common.sh" climatecheck2025

LARGE=$(model BAAI/bge-reranker-large $CROSS)
RERANKER_M3=$(model BAAI/bge-reranker-v2-m3 $CROSS)
GEMINI=$(llm gemini-2.5-pro)
if [ ! -d "$DATA" ]; then
  python data/download.py climatecheck --edition 2025 --out $DATA
fi
check "${1:-}"
abstracts

stage "1  BM25 over lower-cased words without punctuation and NLTK's stopwords (3.1.1)"
kit 01_index.py $D --indexes bm25 --analyser nltk

stage "2  Candidates: the best 5,000 (3.1.2)"
kit 02_retrieve.py $D --split train --retrievers bm25 --top-k 1000
kit 02_retrieve.py $D --retrievers bm25 --top-k ${DEPTH:-5000}

# rerank NUMBER MODEL BATCH MARGIN: train a reranker with 10 random and 5 hard negatives for every
# positive, and rerank. The model as it comes reranks BM25's 1,000; hard negatives are drawn from
# the best 500, without positives.
rerank() {
  local number=$1 model=$2 batch=$3 margin=$4
  local mined=$WORK/train/$(basename $model).tsv
  kit 03_rerank.py $D --split train --run $WORK/train/bm25.tsv --model $model --depth 1000 \
    --out $mined
  kit recipes/train/mine.py $D $mined --shape tuples --hard 5 --from-top 500 --easy 10 \
    --seed $number --out $WORK/train/examples-$number.jsonl
  kit recipes/train/reranker.py $D $WORK/train/examples-$number.jsonl --model $model --loss margin \
    --margin $margin --batch-size $batch --epochs 1 --lr 1e-5 --seed $number \
    --out $WORK/models/reranker-$number
  kit 03_rerank.py $D --model $WORK/models/reranker-$number --run $T/bm25.tsv \
    --depth ${DEPTH:-5000} --out $T/rerank-$number.tsv
}

stage "3  Five BGE rerankers with margin loss, each with its own negatives (3.2; difference 11)"
rerank 1 $LARGE 8 0.2
rerank 2 $LARGE 16 0.2
rerank 3 $LARGE 8 0.25
rerank 4 $LARGE 16 0.25
rerank 5 $RERANKER_M3 16 0.2

stage "3  Reciprocal rank fusion of the whole lists, k = 6; the best 10 (3.2.3; difference 11)"
kit 02_retrieve.py fuse $D --rrf-k 6 --top-k 10 --out $T/rerank.tsv $T/rerank-{1,2,3,4,5}.tsv

stage "5  Stance: Gemini 2.5 Pro as an expert, 50 pairs a prompt, a digit each (3.3; difference 12)"
# label PAIRS NAME: so many pairs a prompt. The endpoint does not accept a seed.
label() {
  local pairs=$1 name=$2
  kit 05_classify.py llm $D --run $T/rerank.tsv --strategy batch --pairs-per-prompt $pairs \
    --prompt $PROMPTS/batch.txt --max-tokens 20000 --timeout 600 \
    --extra '{"seed": null}' $GEMINI --out $T/$name.tsv
}
label 50 verdicts

stage "6  The table and the submission"
table metrics climatecheck2025 $T/{bm25,rerank,verdicts}.tsv
kit 06_evaluate.py submission $D $T/verdicts.tsv --task climatecheck2025
further "${1:-}"

stage "tables  Fusion with k = 60"
kit 02_retrieve.py fuse $D --rrf-k 60 --top-k 10 --out $T/rerank-k60.tsv $T/rerank-{1,2,3,4,5}.tsv

stage "tables  The rerankers without fine-tuning"
# untuned NAME MODEL
untuned() {
  local name=$1 model=$2
  kit 03_rerank.py $D --model $model --run $T/bm25.tsv --depth ${DEPTH:-5000} --top-k 10 \
    --out $T/$name.tsv
}
untuned large-untuned $LARGE
untuned m3-untuned $RERANKER_M3

stage "tables  Figure 2: one pair a prompt"
label 1 one-pair
table tables climatecheck2025 $T/{verdicts,one-pair,bm25,large-untuned,m3-untuned}.tsv \
  $T/rerank{-1,-2,-3,-4,-5,-k60,}.tsv
