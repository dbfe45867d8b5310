#!/usr/bin/env bash
# Upravitelev et al., EFC at ClimateCheck 2025 (SDP 2025; sections of the overview;
# https://github.com/XplaiNLP/climatecheck-submission): BM25, a tuned E5 and a cross-encoder; stance
# by Qwen3-14B (submitted) or DeBERTa. For one A100, with Qwen3-14B behind an endpoint such as
# vLLM's:
#   LLM_BASE_URL=http://localhost:8000/v1 bash recipes/systems/efc.sh
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/systems/efc.sh tables
. "$(dirname "$0")/common.sh" climatecheck2025

E5=$(model intfloat/e5-large-v2 $MINILM)
CROSS_ENCODER=$(model cross-encoder/ms-marco-MiniLM-L12-v2 $CROSS)
DEBERTA=$(model MoritzLaurer/DeBERTa-v3-large-mnli-fever-anli-ling-wanli $NLI)
QWEN=$(llm Qwen/Qwen3-14B)
PREFIXES=(--query-prompt "query: " --document-prompt "passage: ")
if [ ! -d "$DATA" ]; then
  python data/download.py climatecheck --edition 2025 --out $DATA
fi
check "${1:-}"
abstracts

stage "1  E5 fine-tuned; negatives: the three least similar of BM25's (7.4; differences 15, 17)"
kit 01_index.py $D --indexes bm25 --analyser cased
kit 01_index.py $D --indexes dense --dense-model $E5 "${PREFIXES[@]}" --out $WORK/index-e5
kit 02_retrieve.py $D --split train --retrievers bm25 --top-k 1500
kit 02_retrieve.py $D --split train --index $WORK/index-e5 --retrievers dense --top-k 1500 \
  --restrict $WORK/train/bm25.tsv
kit recipes/train/mine.py $D $WORK/train/dense.tsv --shape tuples --hard 3 --draw worst \
  --from-top 1500 --out $WORK/train/triplets.jsonl
kit recipes/train/encoder.py $D $WORK/train/triplets.jsonl --model $E5 "${PREFIXES[@]}" \
  --loss mnrl --epochs 3 --lr 2e-5 --batch-size 16 --out $WORK/models/encoder
kit 01_index.py $D --indexes dense --dense-model $WORK/models/encoder "${PREFIXES[@]}"

stage "2  Retrieval: 1,500 by BM25, of which E5 keeps 150 (7.4)"
kit 02_retrieve.py $D --retrievers bm25 --top-k 1500
kit 02_retrieve.py $D --retrievers dense --restrict $T/bm25.tsv --top-k 150

stage "3  Reranking: ms-marco-MiniLM-L12-v2 as it is; the best 10 (7.4)"
# rerank RUN NAME
rerank() {
  local run=$1 name=$2
  kit 03_rerank.py $D --run $T/$run.tsv --model $CROSS_ENCODER --depth 150 --top-k 10 \
    --out $T/$name.tsv
}
rerank dense rerank

stage "5  Stance, submitted: Qwen3-14B zero-shot with reasoning (7.4; difference 1)"
kit 05_classify.py llm $D --run $T/rerank.tsv --prompt $PROMPTS/reasoning.txt \
  --max-tokens 4096 --timeout 600 $QWEN --out $T/verdicts.tsv

stage "6  The table and the submission"
table metrics climatecheck2025 $T/{bm25,dense,rerank,verdicts}.tsv
kit 06_evaluate.py submission $D $T/verdicts.tsv --task climatecheck2025
further "${1:-}"

stage "tables  Stance by DeBERTa-v3-large, trained on NLI: fine-tuned, and not (difference 16)"
kit recipes/train/classifier.py $D --model $DEBERTA --loss cross-entropy --sampler shuffle \
  --epochs 20 --patience 10 --lr 1e-5 --schedule linear --batch-size 16 --held-out 0.2 \
  --split-by instance --weight-decay 0.01 --out $WORK/models/deberta
kit 05_classify.py $D --run $T/rerank.tsv --model $WORK/models/deberta --out $T/deberta.tsv
kit 05_classify.py $D --run $T/rerank.tsv --model $DEBERTA --out $T/deberta-nli.tsv

stage "tables  Retrieval: E5 without fine-tuning; the cross-encoder behind BM25 alone"
kit 02_retrieve.py $D --index $WORK/index-e5 --retrievers dense --restrict $T/bm25.tsv \
  --top-k 150 --out $T/untuned
cp $T/untuned/dense.tsv $T/dense-untuned.tsv
rerank dense-untuned rerank-untuned
rerank bm25 bm25-rerank
table tables climatecheck2025 $T/{verdicts,deberta,deberta-nli}.tsv \
  $T/{bm25,dense-untuned,dense,bm25-rerank,rerank-untuned,rerank}.tsv
