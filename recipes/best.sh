#!/usr/bin/env bash
# This year's strongest open models, none of them fine-tuned: BM25, Qwen3-Embedding and SPLADE-v3;
# Qwen3-Reranker; Qwen3 as a judge of one abstract, then of twenty; stance by it and an NLI model.
# Not measured at full size. For one A100 of 80 GB, with vLLM installed for stages 4 and 5; the hub
# wants the terms of naver/splade-v3 accepted, and HF_TOKEN. On Kaggle's two T4 of 16 GB:
#   SIZE=0.6B DEVICE="cuda:0 cuda:1" VLLM="--dtype half" bash recipes/best.sh
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/best.sh
#
#   EDITION=2025|2026         of ClimateCheck (default: 2026)
#   SIZE=0.6B|4B|8B           of all three models (default: 4B); python tests/benchmarks/budget.py
#   EMBEDDER, RERANKER, LLM   prints the GPU memory of each; these three set one size alone
#   DEVICE="cuda:0 cuda:1"    GPUs of stages 1, 3 and 5
#   VLLM="FLAGS"              of vllm run-batch
EDITION=${EDITION:-2026}
. "$(dirname "$0")/common.sh" climatecheck$EDITION
SIZE=${SIZE:-4B}
case ${LLM:=$SIZE} in 4B) JUDGE=Qwen/Qwen3-4B-Instruct-2507 ;; *) JUDGE=Qwen/Qwen3-$LLM ;; esac
for size in $SIZE ${EMBEDDER:=$SIZE} ${RERANKER:=$SIZE} $LLM; do
  case $size in 0.6B | 4B | 8B) ;; *) refuse "SIZE: '$size'; give 0.6B, 4B or 8B" ;; esac
done
QUICK='--extra {"chat_template_kwargs":{"enable_thinking":false}}'  # answers without reasoning
if [ -n "$SMALL${LLM_MODEL:-}" ]; then
  ANSWERS=$(llm $JUDGE)
elif [ -n "${LLM_BASE_URL:-}" ]; then
  ANSWERS="$QUICK $(llm $JUDGE)"
else
  command -v vllm > /dev/null || refuse "vllm: not installed, and it will be asked; or LLM_BASE_URL"
  VLLM="--max-model-len 16384 ${VLLM:-}"
  ANSWERS="$QUICK --backend none --model $JUDGE"
fi
EMBEDDING=$(model Qwen/Qwen3-Embedding-$EMBEDDER $MINILM)
SPLADE=$(model naver/splade-v3 $SPLADE_TINY)
CROSS_ENCODER=$(model Qwen/Qwen3-Reranker-$RERANKER $CAUSAL)
DEBERTA=$(model MoritzLaurer/DeBERTa-v3-large-mnli-fever-anli-ling-wanli $NLI)
TASK="Given a claim from social media, retrieve abstracts of studies that support or refute it"
ON=${DEVICE:+--device $DEVICE}
[ -d "$DATA" ] || python data/download.py climatecheck --edition $EDITION --out $DATA

stage "1  Indexes: BM25, Qwen3-Embedding with an instruction before the claim, SPLADE-v3"
python 01_index.py $D $ON --indexes bm25 splade --splade-model $SPLADE $(small --max-length 64)
python 01_index.py $D $ON --indexes dense --dense-model $EMBEDDING --max-length 1024 \
  --query-prompt "Instruct: $TASK"$'\nQuery:' $(small --max-length 64)

stage "2  Hybrid retrieval: the best 200 by reciprocal rank fusion"
python 02_retrieve.py $D --top-k ${DEPTH:-200}

stage "3  Reranking: Qwen3-Reranker with the same instruction; a fifth of the score is the fusion's"
python 03_rerank.py $D $ON --model $CROSS_ENCODER --prompt "$TASK" --depth ${DEPTH:-200} \
  --max-length 1024 --first-stage 0.2 $(small --depth 20 --max-length 256)

stage "4  Pointwise: is this abstract evidence? The first 50; then the best 20 in one window"
ask $T/pointwise python 04_llm_rerank.py $D $ANSWERS --method pointwise --depth 50 --top-k 20 \
  --max-words 300 $(small --depth 5 --max-words 40)
ask $T/llm python 04_llm_rerank.py $D $ANSWERS --run $T/pointwise.tsv --depth 20 --window 20 \
  --max-words 300 $(small --depth 5 --max-words 40)

stage "5  Stance: the language model; an NLI model votes, too: the mean of their probabilities"
ask $T/verdicts python 05_classify.py llm $D $ANSWERS $(small --max-words 40)
python 05_classify.py $D $ON --model $DEBERTA --out $T/nli.tsv $(small --max-length 128)
python recipes/tools/verdicts.py mean $T/verdicts.tsv $T/nli.tsv --out $T/combined.tsv

stage "6  The table and the submission"
[ ! -e $DATA/qrels.test.tsv ] || python 06_evaluate.py $D \
  $T/{bm25,splade,dense,hybrid,rerank,pointwise,llm,verdicts,nli,combined}.tsv
python 06_evaluate.py submission $D $T/combined.tsv --task climatecheck$EDITION
