#!/usr/bin/env bash
# claim2source at CheckThat! 2026, task 1 (CLEF; https://github.com/faerber-lab/CheckThat2026):
# first. Which of 10,000 papers is a post in English, French or German about? For one GPU of 80 GB,
# with peft; the data on request, translations and the choice from an endpoint:
#   python data/download.py checkthat2026 --from FOLDER
#   LLM_BASE_URL=http://localhost:8000/v1 bash recipes/systems/claim2source_2026.sh
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/systems/claim2source_2026.sh tables
#   CHOICE_BASE_URL=URL  endpoint of the model that chooses (default: LLM_BASE_URL)
. "$(dirname "$0")/common.sh" checkthat2026
. recipes/systems/claim2source_2026_steps.sh

GRITLM=$(model GritLM/GritLM-7B $MINILM)
QWEN=$(model Qwen/Qwen3-Reranker-8B $CAUSAL)
TRANSLATOR=$(llm Qwen/Qwen3-8B)
CHOICE="$(llm moonshotai/Kimi-K2.6) ${CHOICE_BASE_URL:+--base-url $CHOICE_BASE_URL}"
if [ ! -d "$DATA" ]; then
  python data/download.py checkthat2026 --out $DATA
fi
check "${1:-}"
ABOUT="Given a post on social media, find the scientific paper that it is about"

stage "1  Papers with the last names of six authors, and with named fields"
python recipes/tools/texts.py $DATA $WORK/named --described 3
D="--data $WORK/named --work $WORK"
PAPERS="--fields title,abstract,venue,authors"

stage "2  Qwen3-8B translates French and German posts into English (difference 49)"
posts train
posts test

stage "1, 2  BM25 finds negatives (difference 50)"
kit 01_index.py $D --indexes bm25 $PAPERS
kit 02_retrieve.py $D --split train --claims $WORK/train/claims.both.tsv --retrievers bm25
kit recipes/train/mine.py $D $WORK/train/bm25.tsv --shape tuples --hard 4 --easy 4

stage "1  GritLM-7B learns by LoRA, with attention in both directions (difference 51)"
if [ -z "$SMALL" ]; then
  both_ways $GRITLM $WORK/models/gritlm
  GRITLM=$WORK/models/gritlm
fi
kit recipes/train/encoder.py $D --claims $WORK/train/claims.both.tsv $PAPERS --model $GRITLM \
  --loss mnrl --scale 14.2857 --lr 2e-4 --schedule cosine --warmup 0.05 --weight-decay 0.01 \
  --epochs 4 --batch-size 8 --accumulate 4 --lora 16 --lora-alpha 64 --lora-dropout 0.1 \
  --max-length 256 --checkpointing --dev-split none

stage "1, 2  It finds 100 papers by the post and its translation (difference 52)"
kit 01_index.py $D --indexes dense --dense-model $WORK/models/encoder --max-length 512 $PAPERS \
  --query-prompt "$ABOUT"$'\n<|embed|>\n' --document-prompt $'<|embed|>\n'
kit 02_retrieve.py $D --claims $T/claims.both.tsv --retrievers dense --top-k 100

stage "3  Qwen3-Reranker-8B orders them by the translation (difference 53)"
rerank test

stage "4  A language model chooses one of the best ten (difference 54)"
choose test

stage "6  The table and the submission"
table metrics "MRR@5 R@5 R@10" $T/{dense,rerank,chosen}.tsv
kit 06_evaluate.py submission $D $T/chosen.tsv --task $(checkthat_task)
further "${1:-}"

dev_or_test

stage "tables  The stages on $SPLIT; GritLM on translations alone"
posts $SPLIT
kit 02_retrieve.py $D --split $SPLIT --claims $S/claims.both.tsv --retrievers dense --top-k 100
rerank $SPLIT
choose $SPLIT
kit 02_retrieve.py $D --split $SPLIT --claims $WORK/$SPLIT/claims.translation.tsv \
  --retrievers dense --top-k 100 --out $S/translated
cp $S/translated/dense.tsv $S/translated.tsv
kit 06_evaluate.py $D --split $SPLIT $S/{dense,translated,rerank,chosen}.tsv \
  --measures MRR@5 R@5 R@10 --out $S/tables.tsv
remarks
