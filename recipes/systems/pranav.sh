#!/usr/bin/env bash
# Pranav at ClimateCheck 2025 (SDP 2025): SPLADE finds 40 abstracts, one prompt orders them
# (sections of the overview).
# Nothing is trained. For any GPU; the hub wants the terms of naver/splade-v3 accepted, and
# HF_TOKEN; Gemini at its own endpoint:
#   export LLM_BASE_URL=https://generativelanguage.googleapis.com/v1beta/openai/ OPENAI_API_KEY=...
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/systems/pranav.sh tables
. "$(dirname "$0")/common.sh" climatecheck2025

SPLADE=$(model naver/splade-v3 $SPLADE_TINY)
GEMINI=$(llm gemini-2.0-flash)
if [ ! -d "$DATA" ]; then
  python data/download.py climatecheck --edition 2025 --out $DATA
fi
check "${1:-}"
abstracts

stage "1, 2  SPLADE-v3: the best 40 (7.5)"
kit 01_index.py $D --indexes splade --splade-model $SPLADE --batch-size 128
kit 02_retrieve.py $D --retrievers splade --top-k 40

stage "4  Gemini 2.0 Flash sees all 40 whole abstracts and names the ten best (7.5; difference 1)"
# order RUN DEPTH NAME: the endpoint does not accept a seed.
order() {
  local run=$1 depth=$2 name=$3
  kit 04_llm_rerank.py $D --run $T/$run.tsv --depth $depth --window $depth --best 10 --alpha 0 \
    --top-k 10 --extra '{"seed": null}' --prompt $PROMPTS/ten-best.txt $GEMINI \
    --out $T/$name.tsv
}
order splade 40 llm

stage "6  The table and the submission"
table metrics climatecheck2025 $T/{splade,llm}.tsv
kit 06_evaluate.py submission $D $T/llm.tsv --task climatecheck2025
further "${1:-}"

stage "tables  BM25 in place of SPLADE; 20 abstracts in the prompt"
kit 01_index.py $D --indexes bm25
kit 02_retrieve.py $D --retrievers bm25 --top-k 40
order bm25 40 bm25-llm
order splade 20 llm-20
table tables climatecheck2025 $T/{llm,splade,bm25,bm25-llm,llm-20}.tsv
