#!/usr/bin/env bash
# ClimateSense (https://github.com/climatesense-project/climatesense-climatecheck2026), best system
# of ClimateCheck 2026, task 1: Ant Bridge's retrieval, stance by an open language model. For one
# A100, with gpt-oss-120b behind an endpoint such as vLLM's:
#   LLM_BASE_URL=http://localhost:8000/v1 bash recipes/climatesense_2026.sh
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/climatesense_2026.sh tables
. "$(dirname "$0")/common.sh" climatecheck2026
LARGE=$(model BAAI/bge-reranker-large $CROSS)
M3=$(model BAAI/bge-reranker-v2-m3 $CROSS)
GPT_OSS=$(llm openai/gpt-oss-120b)
[ -d "$DATA" ] || python data/download.py climatecheck --edition 2026 --out $DATA
abstracts

stage "1, 2  BM25: the best 5,000; on the train split bge-reranker-large orders the best 1,000"
python 01_index.py $D --indexes bm25 --analyser nltk
python 02_retrieve.py $D --split train --retrievers bm25 --top-k 1000
python 02_retrieve.py $D --retrievers bm25 --top-k ${DEPTH:-5000}
python 03_rerank.py $D --split train --run $WORK/train/bm25.tsv --model $LARGE --depth 1000 \
  --top-k 500 --out $WORK/train/mined.tsv $(small --depth 5 --max-length 96)

# rerank NUMBER MODEL BATCH MARGIN: train a reranker, and keep its best 500
rerank() {
  python 02_retrieve.py mine $D $WORK/train/mined.tsv --shape tuples --hard 5 --from-top 500 \
    --easy 10 --seed $1 --out $WORK/train/examples-$1.jsonl \
    $(small --hard 1 --easy 1)
  python 03_rerank.py train $D $WORK/train/examples-$1.jsonl --model $2 --loss margin --margin $4 \
    --batch-size $3 --epochs 1 --lr 1e-5 --seed $1 --out $WORK/models/reranker-$1 \
    $(small --max-length 96)
  python 03_rerank.py $D --model $WORK/models/reranker-$1 --run $T/bm25.tsv \
    --depth ${DEPTH:-5000} --top-k 500 --out $T/rerank-$1.tsv $(small --depth 20 --max-length 256)
}
stage "3  Five BGE rerankers with margin loss, as Ant Bridge's (difference 18)"
rerank 1 $LARGE 8 0.2
rerank 2 $LARGE 16 0.2
rerank 3 $LARGE 8 0.25
rerank 4 $LARGE 16 0.25
rerank 5 $M3 16 0.2

stage "2  Reciprocal rank fusion of the five with k = 6; the best 10"
fuse() { # K NAME
  python 02_retrieve.py fuse $D --rrf-k $1 --top-k 10 --out $T/$2.tsv \
    $T/rerank-{1,2,3,4,5}.tsv
}
fuse 6 rerank

stage "5  Stance: gpt-oss-120b, zero-shot, a label in JSON (difference 17)"
P=recipes/prompts
label() { # NAME FLAGS
  python 05_classify.py llm $D --run $T/rerank.tsv --max-tokens 1024 --structured $GPT_OSS \
    --out $T/$1.tsv "${@:2}"
}
label verdicts --prompt $P/json.txt

stage "6  The table and the submission"
table climatecheck2026 $T/{bm25,rerank,verdicts}.tsv
python 06_evaluate.py submission $D $T/verdicts.tsv --task climatecheck2026
further "${1:-}"

stage "tables  Each reranker alone; fusion with k = 60; stance in two steps"
fuse 60 rerank-k60
label two-step --strategy two-step --prompt $P/two-step-evidence.txt $P/two-step-direction.txt \
  $(small --top-k 2)
table climatecheck2026 $T/{verdicts,two-step,bm25}.tsv $T/rerank{-1,-2,-3,-4,-5,-k60,}.tsv \
  --out $T/tables.tsv
remarks
