#!/usr/bin/env bash
# Kiepura & Lam, "ClimateCheck2025: Multi-Stage Retrieval Meets LLMs for Automated Scientific Fact-Checking" (SDP 2025):
# second place in ClimateCheck 2025, first in Recall@2. For one A100, with an OPENAI_API_KEY; the hub wants the terms of
# naver/splade-v3 accepted, and HF_TOKEN.
# In small, within minutes: DATA=data/demo SMALL=1 bash recipes/kiepura_lam.sh
. "$(dirname "$0")/common.sh" climatecheck2025
DENSE=$(model BAAI/bge-m3 $MINILM)
SPLADE=$(model naver/splade-v3 $SPLADE_TINY)
CROSS_ENCODER=$(model cross-encoder/ms-marco-MiniLM-L-6-v2 $CROSS)
DEBERTA=$(model MoritzLaurer/DeBERTa-v3-base-mnli $CROSS)
GPT=$(llm gpt-4.1)
[ -d "$DATA" ] || python data/download.py climatecheck --edition 2025 --out $DATA

stage "1  Section 4.1, indexes: BM25, SPLADE-v3 (eq. 2), BGE-M3 fine-tuned with NEI as negatives"
python 01_index.py $D --indexes bm25 splade --splade-model $SPLADE --activation relu $(small --max-length 64)
python 01_index.py train $D --model $DENSE --loss triplet --margin 0.3 --epochs 3 --lr 5e-5 --batch-size 32 --accumulate 2 \
  $(small --epochs 0.1 --max-length 48)
python 01_index.py $D --indexes dense --dense-model $WORK/models/encoder $(small --max-length 64)

stage "2  Section 4.1, hybrid retrieval: the best 600 by reciprocal rank fusion"
python 02_retrieve.py $D --split train --top-k 600 --rrf-k 60
python 02_retrieve.py $D --top-k 600 --rrf-k 60

stage "3  Section 4.1, cross-encoder: two phases, the second with the negatives that the first ranks highest; the best 20"
python 03_rerank.py train $D --recipe two-phase --model $CROSS_ENCODER --depth 200 --hard 4 --easy 4 --epochs 3 2 --lr 2e-5 \
  --batch-size 16 $(small --depth 5 --hard 1 --easy 0 --epochs 1 1 --max-length 64)
python 03_rerank.py $D --depth ${DEPTH:-600} --top-k 20 $(small --depth 20 --max-length 256)

stage "4  Section 4.1, RankGPT: GPT-4.1 orders the 20 in one window; 0.4 of the score stays the cross-encoder's (eq. 4, 5)"
python 04_llm_rerank.py $D $GPT --depth 20 --window 20 --alpha 0.4 --top-k 10 --fewshot 1 --temperature 0

stage "5  Section 4.2, stance: GPT-4.1 zero-shot hybrid; and (4.2.2) DeBERTa with its encoder frozen and focal loss"
python 05_classify.py llm $D $GPT --strategy zero-shot-hybrid --temperature 0 --out $T/verdicts.tsv
python 05_classify.py train $D --model $DEBERTA --freeze encoder --sampler balanced --loss focal --epochs 10 --lr 5e-5 \
  --batch-size 32 --dev-share 0.1 $(small --epochs 1 --max-length 64)
python 05_classify.py $D --out $T/deberta.tsv $(small --max-length 64)

stage "6  The table, where the test split has judgements; the submission"
[ ! -e "$DATA/qrels.test.tsv" ] || python 06_evaluate.py $D $T/{bm25,splade,dense,hybrid,rerank,llm,verdicts,deberta}.tsv
python 06_evaluate.py submission $D --task climatecheck2025

# Published, ClimateCheck 2025, test:   R@2   R@5  R@10 B-Pref Subtask I    F1
#                                      .231  .441  .601   .482      .439  .696
