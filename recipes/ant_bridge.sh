#!/usr/bin/env bash
# Wang et al., "Winning ClimateCheck: A Multi-Stage System with BM25, BGE-Reranker Ensembles, and
# LLM-based Analysis" (SDP 2025; https://github.com/cklcklckl/climatecheck_1st_solution):
# Ant Bridge, first in both subtasks of ClimateCheck 2025.
# For one A100; Gemini at its own endpoint:
#   export LLM_BASE_URL=https://generativelanguage.googleapis.com/v1beta/openai/ OPENAI_API_KEY=...
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/ant_bridge.sh tables
. "$(dirname "$0")/common.sh" climatecheck2025
LARGE=$(model BAAI/bge-reranker-large $CROSS)
M3=$(model BAAI/bge-reranker-v2-m3 $CROSS)
GEMINI=$(llm gemini-2.5-pro)
[ -d "$DATA" ] || python data/download.py climatecheck --edition 2025 --out $DATA
abstracts

stage "1  BM25 over lower-cased words without punctuation and NLTK's stopwords (3.1.1)"
python 01_index.py $D --indexes bm25 --analyser nltk

stage "2  Candidates: the best 5,000 (3.1.2)"
python 02_retrieve.py $D --split train --retrievers bm25 --top-k 1000
python 02_retrieve.py $D --retrievers bm25 --top-k ${DEPTH:-5000}

# rerank NUMBER MODEL BATCH MARGIN: 10 random and 5 hard negatives for every positive. The model as
# it comes reranks BM25's 1,000; hard negatives are drawn from the best 500 that are not positives.
rerank() {
  python 03_rerank.py $D --split train --run $WORK/train/bm25.tsv --model $2 --depth 1000 \
    --out $WORK/train/$(basename $2).tsv $(small --depth 5 --max-length 96)
  python 02_retrieve.py mine $D $WORK/train/$(basename $2).tsv --shape tuples --hard 5 \
    --from-top 500 --easy 10 --seed $1 \
    --out $WORK/train/examples-$1.jsonl $(small --hard 1 --easy 1)
  python 03_rerank.py train $D $WORK/train/examples-$1.jsonl --model $2 --loss margin --margin $4 \
    --batch-size $3 --epochs 1 --lr 1e-5 --seed $1 --out $WORK/models/reranker-$1 \
    $(small --max-length 96)
  python 03_rerank.py $D --model $WORK/models/reranker-$1 --run $T/bm25.tsv \
    --depth ${DEPTH:-5000} --out $T/rerank-$1.tsv $(small --depth 20 --max-length 256)
}
stage "3  Five BGE rerankers with margin loss, each with its own negatives (3.2; difference 9)"
rerank 1 $LARGE 8 0.2
rerank 2 $LARGE 16 0.2
rerank 3 $LARGE 8 0.25
rerank 4 $LARGE 16 0.25
rerank 5 $M3 16 0.2

stage "3  Final list: reciprocal rank fusion of the whole lists (k = 6), the best 10 (3.2.3; 9)"
fuse() { # K NAME
  python 02_retrieve.py fuse $D --rrf-k $1 --top-k 10 --out $T/$2.tsv \
    $T/rerank-{1,2,3,4,5}.tsv
}
fuse 6 rerank

# Gemini's endpoint does not accept a seed.
stage "5  Stance: Gemini 2.5 Pro as an expert, 50 pairs a prompt, a digit each (3.3; 10)"
label() { # PAIRS NAME FLAGS
  python 05_classify.py llm $D --run $T/rerank.tsv --strategy batch --pairs-per-prompt $1 \
    --prompt recipes/prompts/batch.txt --max-tokens 20000 --timeout 600 \
    --extra '{"seed": null}' $GEMINI --out $T/$2.tsv "${@:3}"
}
label 50 verdicts

stage "6  The table and the submission"
table climatecheck2025 $T/{bm25,rerank,verdicts}.tsv
python 06_evaluate.py submission $D $T/verdicts.tsv --task climatecheck2025
further "${1:-}"

stage "tables  Each reranker alone; fusion with k = 60"
fuse 60 rerank-k60
stage "tables  The rerankers without fine-tuning"
ROWS=
for model in $LARGE $M3; do
  python 03_rerank.py $D --model $model --run $T/bm25.tsv --depth ${DEPTH:-5000} --top-k 10 \
    --out $T/$(basename $model)-untuned.tsv $(small --depth 20 --max-length 256)
  ROWS="$ROWS $T/$(basename $model)-untuned.tsv"
done
stage "tables  Figure 2: one pair a prompt"
label 1 one-pair $(small --top-k 2)
table climatecheck2025 $T/{verdicts,one-pair,bm25}.tsv $ROWS \
  $T/rerank{-1,-2,-3,-4,-5,-k60,}.tsv --out $T/tables.tsv
