#!/usr/bin/env bash
# EFC at ClimateCheck 2025 (SDP 2025): BM25, a fine-tuned E5 and a cross-encoder; stance by DeBERTa or by Qwen3.
# For one A100, with Qwen3-14B behind an endpoint such as vLLM's: LLM_BASE_URL=http://localhost:8000/v1
# In small, within minutes: DATA=data/demo SMALL=1 bash recipes/efc.sh
. "$(dirname "$0")/common.sh" climatecheck2025
E5=$(model intfloat/e5-large-v2 $MINILM)
CROSS_ENCODER=$(model cross-encoder/ms-marco-MiniLM-L12-v2 $CROSS)
DEBERTA=$(model MoritzLaurer/DeBERTa-v3-large-mnli-fever-anli-ling-wanli $CROSS)
QWEN=$(llm Qwen/Qwen3-14B 48)
PROMPTS=(--query-prompt "query: " --document-prompt "passage: ")
[ -d "$DATA" ] || python data/download.py climatecheck --edition 2025 --out $DATA

stage "1  Indexes: BM25, and E5 fine-tuned with the three least similar abstracts as negatives"
python 01_index.py train $D --model $E5 "${PROMPTS[@]}" --loss mnrl --hard-negatives 3 --negatives-from bottom --epochs 3 \
  --lr 2e-5 --batch-size 16 $(small --epochs 0.25 --max-length 48)
python 01_index.py $D --indexes bm25 dense --dense-model $WORK/models/encoder "${PROMPTS[@]}" $(small --max-length 64)

stage "2  Retrieval: 1,500 by BM25, of which E5 keeps 150"
python 02_retrieve.py $D --retrievers bm25 --top-k 1500
python 02_retrieve.py $D --retrievers dense --restrict $T/bm25.tsv --top-k 150

stage "3  Reranking: ms-marco-MiniLM-L12-v2 as it is; the best 10"
python 03_rerank.py $D --run $T/dense.tsv --model $CROSS_ENCODER --depth 150 --top-k 10 $(small --depth 20 --max-length 256)

stage "5  Stance: DeBERTa-v3-large, trained on NLI, fine-tuned; and Qwen3-14B, zero-shot with reasoning"
python 05_classify.py train $D --model $DEBERTA --loss cross-entropy --sampler shuffle --epochs 20 --patience 10 --lr 1e-5 \
  --schedule linear --batch-size 16 --dev-share 0.2 $(small --epochs 1 --max-length 64 --lr 1e-4)
python 05_classify.py $D --run $T/rerank.tsv $(small --max-length 64)
python 05_classify.py llm $D $QWEN --run $T/rerank.tsv --strategy reasoning --timeout 600 --out $T/llm_verdicts.tsv

stage "6  The table, where the test split has judgements; the submission"
[ ! -e "$DATA/qrels.test.tsv" ] || python 06_evaluate.py $D $T/{bm25,dense,rerank,verdicts,llm_verdicts}.tsv
python 06_evaluate.py submission $D --task climatecheck2025

# Published, ClimateCheck 2025, test:   R@2   R@5  R@10 B-Pref Subtask I    F1
#                                      .218  .406  .574   .450      .412  .717
