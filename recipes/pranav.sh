#!/usr/bin/env bash
# Pranav at ClimateCheck 2025 (SDP 2025): SPLADE finds 40 abstracts, one prompt orders them
# (sections of the overview).
# Nothing is trained. For any GPU; the hub wants the terms of naver/splade-v3 accepted, and
# HF_TOKEN; Gemini at its own endpoint:
#   export LLM_BASE_URL=https://generativelanguage.googleapis.com/v1beta/openai/ OPENAI_API_KEY=...
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/pranav.sh tables
. "$(dirname "$0")/common.sh" climatecheck2025
SPLADE=$(model naver/splade-v3 $SPLADE_TINY)
GEMINI=$(llm gemini-2.0-flash)
[ -d "$DATA" ] || python data/download.py climatecheck --edition 2025 --out $DATA
abstracts

stage "1, 2  SPLADE-v3: the best 40 (7.5)"
python 01_index.py $D --indexes splade --splade-model $SPLADE $(small --max-length 64)
python 02_retrieve.py $D --retrievers splade --top-k 40

# Gemini's endpoint does not accept a seed.
stage "4  Gemini 2.0 Flash sees all 40 whole abstracts and names the ten best (7.5; difference 1)"
order() { # RUN DEPTH NAME
  python 04_llm_rerank.py $D --run $T/$1.tsv --depth $2 --window $2 --best 10 --alpha 0 \
    --top-k 10 --extra '{"seed": null}' --prompt recipes/prompts/ten-best.txt $GEMINI \
    --out $T/$3.tsv $(small --depth 8 --best 4)
}
order splade 40 llm

stage "6  The table and the submission"
table climatecheck2025 $T/{splade,llm}.tsv
python 06_evaluate.py submission $D $T/llm.tsv --task climatecheck2025
further "${1:-}"

stage "tables  BM25 in place of SPLADE; 20 abstracts in the prompt"
python 01_index.py $D --indexes bm25
python 02_retrieve.py $D --retrievers bm25 --top-k 40
order bm25 40 bm25-llm
order splade 20 llm-20
table climatecheck2025 $T/{llm,splade,bm25,bm25-llm,llm-20}.tsv --out $T/tables.tsv
