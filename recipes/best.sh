#!/usr/bin/env bash
# Open models of your choice, none of them fine-tuned: BM25 and an encoder, a reranker, a language
# model that judges one abstract, then twenty; stance by it and an NLI model.
# Not measured at full size. For one GPU of 24 GB (16 GiB by arithmetic: README.md), with vLLM
# installed for stages 4 and 5:
#   bash recipes/best.sh
# On Kaggle's two T4 of 16 GB:
#   ENCODER=Qwen/Qwen3-Embedding-0.6B RERANKER=Qwen/Qwen3-Reranker-0.6B JUDGE=Qwen/Qwen3-0.6B \
#     DEVICE="cuda:0 cuda:1" VLLM="--dtype half" bash recipes/best.sh
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/best.sh
#
#   EDITION=2025|2026    of ClimateCheck (default: 2026)
#   ENCODER=NAME         any SentenceTransformer (default: Qwen/Qwen3-Embedding-4B)
#   QUERY_PROMPT=TEXT    before each claim (default: an instruction, as Qwen3-Embedding wants it)
#   RERANKER=NAME        any CrossEncoder (default: Qwen/Qwen3-Reranker-4B)
#   RERANKER_PROMPT=TEXT its instruction; empty for rerankers without one
#   JUDGE=NAME           any chat model that vLLM runs (default: Qwen/Qwen3-4B-Instruct-2507)
#   NLI_MODEL=NAME       any classifier with the three labels (default: a DeBERTa-v3-large)
#   DEPTH=N              candidates per claim (default: 200)
#   DEVICE="cuda:0 ..."  GPUs of stages 1 and 3; the first is that of stage 5
#   VLLM="FLAGS"         of vllm run-batch
# Models that need code of their own (trust_remote_code) are left out, as the kit never runs it:
# llama-nemotron-rerank-1b-v2, the best reranker of Retrix at CheckThat! 2026, is one.
EDITION=${EDITION:-2026}
. "$(dirname "$0")/systems/common.sh" climatecheck$EDITION

TASK="Given a claim from social media, retrieve abstracts of studies that support or refute it"
QUERY_PROMPT=${QUERY_PROMPT-"Instruct: $TASK"$'\nQuery:'}
RERANKER_PROMPT=${RERANKER_PROMPT-$TASK}
ENCODER=$(model ${ENCODER:-Qwen/Qwen3-Embedding-4B} $MINILM)
RERANKER=$(model ${RERANKER:-Qwen/Qwen3-Reranker-4B} $CAUSAL)
NLI_MODEL=$(model ${NLI_MODEL:-MoritzLaurer/DeBERTa-v3-large-mnli-fever-anli-ling-wanli} $NLI)
JUDGE=${JUDGE:-Qwen/Qwen3-4B-Instruct-2507}
DEVICES=${DEVICE:+--device $DEVICE}
FIRST_DEVICE=${DEVICE:+--device ${DEVICE%% *}}  # stage 5 takes one

# Who answers in stages 4 and 5: a model that you name, an endpoint, or vllm run-batch. Qwen3 is
# asked to answer without reasoning.
QUICK='--extra {"chat_template_kwargs":{"enable_thinking":false}}'
if [ -n "$SMALL${LLM_MODEL:-}" ]; then
  ANSWERS=$(llm $JUDGE)
elif [ -n "${LLM_BASE_URL:-}" ]; then
  ANSWERS="$QUICK $(llm $JUDGE)"
elif command -v vllm > /dev/null; then
  VLLM="--max-model-len 16384 ${VLLM:-}"
  ANSWERS="$QUICK --backend none --model $JUDGE"
else
  refuse "vllm: not installed, and it will be asked; install it, or set LLM_BASE_URL"
fi
if [ ! -d "$DATA" ]; then
  python data/download.py climatecheck --edition $EDITION --out $DATA
fi

stage "1  Indexes: BM25, and the encoder"
kit 01_index.py $D --indexes bm25
kit 01_index.py $D $DEVICES --indexes dense --dense-model $ENCODER --query-prompt "$QUERY_PROMPT" \
  --max-length 1024

stage "2  Retrieval, and fusion: weights fitted on dev, else 0.2 for BM25 and 0.8 for the encoder"
# With equal weights, the encoder alone won (Kvist et al., CheckThat! 2026, on dev; see IMPROVE.md).
kit 02_retrieve.py $D --retrievers bm25 dense --top-k ${DEPTH:-200}
if [ -e $DATA/qrels.dev.tsv ]; then
  kit 02_retrieve.py $D --split dev --retrievers bm25 dense --top-k ${DEPTH:-200}
  kit recipes/train/fit_fusion.py $D --split dev --out $WORK/fusion.json $WORK/dev/{bm25,dense}.tsv
  kit 02_retrieve.py fuse $D --fusion $WORK/fusion.json --top-k ${DEPTH:-200} \
    --out $T/fused.tsv $T/{bm25,dense}.tsv
else
  kit 02_retrieve.py fuse $D --method zscore --weights 0.2 0.8 --top-k ${DEPTH:-200} \
    --out $T/fused.tsv $T/{bm25,dense}.tsv
fi

stage "3  Reranking; a fifth of the score is the fusion's"
kit 03_rerank.py $D $DEVICES --run $T/fused.tsv --model $RERANKER --prompt "$RERANKER_PROMPT" \
  --depth ${DEPTH:-200} --max-length 1024 --first-stage 0.2 --out $T/rerank.tsv

stage "4  Pointwise: is this abstract evidence? The first 50; then the best 20 in one window"
# ask adds --out: $T/pointwise.tsv, $T/llm.tsv, $T/verdicts.tsv
ask $T/pointwise kit 04_llm_rerank.py $D $ANSWERS --run $T/rerank.tsv --method pointwise \
  --depth 50 --top-k 20 --max-words 300
ask $T/llm kit 04_llm_rerank.py $D $ANSWERS --run $T/pointwise.tsv --depth 20 --window 20 \
  --max-words 300

stage "5  Stance: the language model; an NLI model votes, too: the mean of their probabilities"
ask $T/verdicts kit 05_classify.py llm $D $ANSWERS --run $T/llm.tsv
kit 05_classify.py $D $FIRST_DEVICE --run $T/llm.tsv --model $NLI_MODEL --out $T/nli.tsv
python recipes/tools/verdicts.py mean $T/verdicts.tsv $T/nli.tsv --out $T/combined.tsv

stage "6  The table and the submission"
if [ -e $QRELS ]; then
  kit 06_evaluate.py $D \
    $T/{bm25,dense,fused,rerank,pointwise,llm,verdicts,nli,combined}.tsv
fi
kit 06_evaluate.py submission $D $T/combined.tsv --task climatecheck$EDITION
