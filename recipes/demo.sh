#!/usr/bin/env bash
# The whole kit on the bundled demo: claims -> candidates -> order -> verdicts -> table.
# From the repository's root: bash recipes/demo.sh. A second run makes only what is not up to date.
# With LLM_BASE_URL or OPENAI_API_KEY set, stages 4 and 5 ask that endpoint for LLM_MODEL (at OpenAI gpt-4.1 by default).
set -euo pipefail
cd "$(dirname "$0")/.."
export TQDM_MININTERVAL=1  # a sign of life every second or so, also where there is no terminal
stage() { printf '\n------------------------------------------------------------ %s\n' "$1"; }

stage "Models: three small ones, from the Python package index"
python data/download.py models

stage "1  Index: BM25, dense, SPLADE"
python 01_index.py

stage "2  Retrieve: one run an index, and their fusion; the train split feeds the reranker"
python 02_retrieve.py --split train
python 02_retrieve.py

stage "3  Rerank: train a cross-encoder on the train split, then score the hybrid's best 20"
# A bi-encoder's weights and two dozen claims make a weak cross-encoder, so the hybrid run's score keeps most of the say.
python 03_rerank.py train --hard 2 --easy 2 --epochs 1 --max-length 192
python 03_rerank.py --max-length 192 --first-stage 0.8

stage "4  LLM rerank: RankGPT"
if [ -n "${LLM_BASE_URL:-}${OPENAI_API_KEY:-}" ]; then
  [ -n "${LLM_BASE_URL:-}" ] || export LLM_MODEL="${LLM_MODEL:-gpt-4.1}"
  python 04_llm_rerank.py --backend openai
else
  echo "No LLM_BASE_URL or OPENAI_API_KEY: the packaged SmolLM2 answers, in this process."
  echo "A model of 135M parameters shows that this stage runs, not what it can do."
  python 04_llm_rerank.py --backend transformers --depth 5 --max-words 40
fi

stage "5  Classify: train on the train split's judgements, then label the best 10; a verdict a claim, with its evidence"
# The reranker has learnt to compare two texts already; 162 pairs are too few to move its lower layers, too.
python 05_classify.py train --model work/demo/models/reranker --freeze 4 --epochs 4 --batch-size 8 --lr 2e-4 \
  --schedule linear --max-length 192
python 05_classify.py --max-length 192 --aggregate work/demo/test/claims.jsonl
if [ -n "${LLM_BASE_URL:-}${OPENAI_API_KEY:-}" ]; then
  python 05_classify.py llm --backend openai
fi

stage "6  Evaluate: ClimateCheck 2025, and a page to look at"
python 06_evaluate.py --report work/demo/test/report.html
