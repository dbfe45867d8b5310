#!/usr/bin/env bash
# The reranker of checkthat_2026.sh: Retrix's fine-tuning by LoRA on the English posts of 2026 and
# 2025 (3.5). checkthat_2026.sh, whose head lists the settings, calls this file with its DATA and
# WORK. It cannot be called alone.
. "$(dirname "$0")/common.sh" checkthat2026

STATIC=$(model sentence-transformers/static-retrieval-mrl-en-v1 $MINILM)
RERANKER=$(model ${RERANKER:-Alibaba-NLP/gte-reranker-modernbert-base} $CROSS)
EARLIER=${EARLIER:-data/checkthat4b}

stage "3  The English posts of both years (3.5)"
python recipes/tools/languages.py $DATA $WORK/languages
TRAIN="--data $WORK/languages/en --work $WORK/english"
if [ -d "$EARLIER" ]; then
  # A checksum in the folder's name: corrected data are joined anew.
  sum=$(cat {$WORK/languages/en,"$EARLIER"}/{*.tsv,corpus.jsonl} | cksum | cut -d " " -f 1)
  python data/download.py join $WORK/joined-$sum $WORK/languages/en "$EARLIER"
  TRAIN="--data $WORK/joined-$sum --work $WORK/english"
else
  echo "warning: EARLIER: no folder '$EARLIER', so the posts of 2026 alone are learnt" >&2
fi

stage "3  Five negatives a post: behind rank 5, and not too similar (3.5; difference 35)"
kit 01_index.py $TRAIN --indexes dense --dense-model $STATIC
kit 02_retrieve.py $TRAIN --split train --retrievers dense --top-k 100
kit recipes/train/mine.py $TRAIN $WORK/english/train/dense.tsv --hard 5 --skip-top 5 --from-top 45 \
  --draw best --max-score 0.85 --margin 0.05

stage "3  Training (3.5; difference 36)"
kit recipes/train/reranker.py $TRAIN --model $RERANKER --loss bce --lora 16 --lora-dropout 0.05 \
  --lr 2e-5 --warmup 0.1 --epochs 3 --batch-size 8 --accumulate 4 --max-length 512 \
  --checkpointing --dev-split none --out $WORK/models/reranker
