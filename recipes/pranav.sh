#!/usr/bin/env bash
# Pranav at ClimateCheck 2025 (SDP 2025): SPLADE finds 40 abstracts, one prompt orders them.
# Nothing is trained. For any GPU; the hub wants the terms of naver/splade-v3 accepted, and
# HF_TOKEN; Gemini at its own endpoint:
#   export LLM_BASE_URL=https://generativelanguage.googleapis.com/v1beta/openai/ OPENAI_API_KEY=...
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/pranav.sh
. "$(dirname "$0")/common.sh" climatecheck2025
SPLADE=$(model naver/splade-v3 $SPLADE_TINY)
GEMINI=$(llm gemini-2.0-flash)
[ -d "$DATA" ] || python data/download.py climatecheck --edition 2025 --out $DATA

stage "1, 2  SPLADE-v3: the best 40"
python 01_index.py $D --indexes splade --splade-model $SPLADE
python 02_retrieve.py $D --retrievers splade --top-k 40

# Gemini's endpoint does not accept a seed.
stage "4  Gemini 2.0 Flash sees all 40 whole abstracts in one window and names the ten best"
python 04_llm_rerank.py $D --run $T/splade.tsv --depth 40 --window 40 --best 10 --alpha 0 \
  --top-k 10 --extra '{"seed": null}' $GEMINI $(small --depth 8 --best 4)

stage "6  The table and the submission"
table climatecheck2025 $T/{splade,llm}.tsv
python 06_evaluate.py submission $D $T/llm.tsv --task climatecheck2025
