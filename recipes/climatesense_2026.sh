#!/usr/bin/env bash
# ClimateSense, the best system of ClimateCheck 2026, task 1: Ant Bridge's retrieval, verification by an open language model.
# For one A100, with gpt-oss-120b behind an endpoint such as vLLM's: LLM_BASE_URL=http://localhost:8000/v1
# In small, within minutes: DATA=data/demo SMALL=1 bash recipes/climatesense_2026.sh
. "$(dirname "$0")/common.sh" climatecheck2026
LARGE=$(model BAAI/bge-reranker-large $CROSS)
M3=$(model BAAI/bge-reranker-v2-m3 $CROSS)
GPT_OSS=$(llm openai/gpt-oss-120b)
[ -d "$DATA" ] || python data/download.py climatecheck --edition 2026 --out $DATA

stage "1, 2  BM25: the best 5,000"
python 01_index.py $D --indexes bm25 --analyser nltk
python 02_retrieve.py $D --split train --retrievers bm25 --top-k 1000
python 02_retrieve.py $D --retrievers bm25 --top-k ${DEPTH:-5000}

stage "3  Five BGE rerankers, as Ant Bridge's: margin loss, 10 random and 5 hard negatives for every positive"
python 03_rerank.py train $D --recipe margin --sweep --model $LARGE $M3 --run $WORK/train/bm25.tsv --depth 1000 \
  --easy 10 --hard 5 --lr 1e-5 --epochs 1 --max-length 512 $(small --depth 4 --easy 1 --hard 0 --max-length 64)

stage "3  Each of them keeps its best 500"
for number in 1 2 3 4 5; do
  python 03_rerank.py $D --model $WORK/models/reranker-$number --run $T/bm25.tsv --depth ${DEPTH:-5000} --top-k 500 \
    --out $T/rerank-$number.tsv $(small --depth 20 --max-length 256)
done

stage "2  Reciprocal rank fusion of the five with k = 6; the best 10"
python 02_retrieve.py fuse $D --rrf-k 6 --top-k 10 --out $T/rerank.tsv $T/rerank-{1,2,3,4,5}.tsv

stage "5  Verification: gpt-oss-120b, zero-shot"
python 05_classify.py llm $D $GPT_OSS --run $T/rerank.tsv --strategy zero-shot-one-step --max-tokens 1024 --temperature 0 \
  --out $T/verdicts.tsv

stage "6  The table, where the test split has judgements; the submission"
[ ! -e "$DATA/qrels.test.tsv" ] || python 06_evaluate.py $D $T/{bm25,rerank,verdicts}.tsv --measures climatecheck2026
python 06_evaluate.py submission $D --task climatecheck2026

# Published, ClimateCheck 2026, test:   Retrieval   Verification
#   ClimateSense                             .466          1.183
#   the organisers' baseline                 .431          1.082
