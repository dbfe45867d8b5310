#!/usr/bin/env bash
# Kiepura & Lam, "ClimateCheck2025: Multi-Stage Retrieval Meets LLMs for Automated Scientific
# Fact-Checking" (SDP 2025; https://github.com/annamkiepura/ClimateCheck): second in ClimateCheck
# 2025, first in Recall@2. For one A100, with an OPENAI_API_KEY; the hub wants the terms of
# naver/splade-v3 accepted, and HF_TOKEN.
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/kiepura_lam.sh tables
. "$(dirname "$0")/common.sh" climatecheck2025
DENSE=$(model BAAI/bge-m3 $MINILM)
SPLADE=$(model naver/splade-v3 $SPLADE_TINY)
CROSS_ENCODER=$(model cross-encoder/ms-marco-MiniLM-L-6-v2 $CROSS)
DEBERTA=$(model MoritzLaurer/DeBERTa-v3-base-mnli $CROSS)
DEBERTA_SCIFACT=$(model jedick/DeBERTa-v3-base-mnli-fever-anli-scifact-citint $CROSS)
ROBERTA_SCIFACT=$(model nikolamilosevic/SCIFACT_xlm_roberta_large $CROSS)
GPT=$(llm gpt-4.1)
P=recipes/prompts
[ -d "$DATA" ] || python data/download.py climatecheck --edition 2025 --out $DATA
abstracts

stage "1  Indexes: BM25 and SPLADE-v3 (4.1.1, eq. 2: ReLU without logarithm; differences 5, 8)"
python 01_index.py $D --indexes bm25 splade --splade-model $SPLADE --activation relu \
  $(small --max-length 64)

stage "1  BGE-M3, fine-tuned on triplets: each with a random NEI abstract of any claim (4.1.1)"
python 02_retrieve.py mine $D --shape tuples --pool nei --hard 0 --easy 1 \
  --out $WORK/train/triplets.jsonl
python 01_index.py train $D $WORK/train/triplets.jsonl --model $DENSE --loss triplet --margin 0.3 \
  --epochs 3 --lr 5e-5 --batch-size 32 --accumulate 2 $(small --epochs 0.1 --max-length 48)
python 01_index.py $D --indexes dense --dense-model $WORK/models/encoder $(small --max-length 64)

stage "2  Hybrid retrieval: the best 600 by reciprocal rank fusion, k = 60 (4.1.1)"
python 02_retrieve.py $D --split train --top-k 600 --rrf-k 60
python 02_retrieve.py $D --top-k 600 --rrf-k 60

# mine RUN EXAMPLES FLAGS: negatives are NEI of any claim; hard ones, the first in the run's 200
NEI="--pool nei --from-top 200 --hard 4 --draw best"
mine() { python 02_retrieve.py mine $D $1 $NEI --out $2 "${@:3}"; }
# train EXAMPLES OUT FLAGS: binary cross-entropy
train() {
  python 03_rerank.py train $D $1 --loss bce --lr 2e-5 --batch-size 16 --out $2 "${@:3}" \
    $(small --epochs 1 --max-length 96)
}
stage "3  Cross-encoder, phase 1: easy negatives, too; 3 epochs (4.1.2; difference 6)"
mine $WORK/train/hybrid.tsv $WORK/train/phase1.jsonl --easy 4
train $WORK/train/phase1.jsonl $WORK/models/phase1 --model $CROSS_ENCODER --epochs 3

stage "3  Cross-encoder, phase 2: the negatives that phase 1 ranks highest; 2 epochs (4.1.2; 6)"
python 03_rerank.py $D --split train --run $WORK/train/hybrid.tsv --model $WORK/models/phase1 \
  --depth 200 --out $WORK/train/phase1.tsv $(small --depth 5 --max-length 96)
mine $WORK/train/phase1.tsv $WORK/train/phase2.jsonl
train $WORK/train/phase2.jsonl $WORK/models/phase2 --model $WORK/models/phase1 --epochs 2

stage "3  Reranking: the best 20 (4.1.2)"
rerank() { # RUN NAME
  python 03_rerank.py $D --run $1 --model $WORK/models/phase2 --depth ${DEPTH:-600} --top-k 20 \
    --out $T/$2.tsv $(small --depth 20 --max-length 256)
}
rerank $T/hybrid.tsv rerank

stage "4  RankGPT: GPT-4.1 orders the 20 in one window; alpha = 0.4 (4.1.3; differences 1, 8)"
rankgpt() { # ALPHA NAME FLAGS
  python 04_llm_rerank.py $D --run $T/rerank.tsv --prompt $P/ranking.txt $GPT --depth 20 \
    --window 20 --alpha $1 --top-k 10 --replies $T/llm.replies.jsonl --out $T/$2.tsv "${@:3}" \
    $(small --depth 5 --max-words 20)
}
python recipes/tools/fewshot.py $D --number 6 $(small --number 1)
rankgpt 0.4 llm --fewshot $T/fewshot.tsv

stage "5  Stance: GPT-4.1, zero-shot hybrid (4.2.1, appendix C; difference 1)"
# label NAME FLAGS
label() { python 05_classify.py llm $D --run $T/llm.tsv $GPT --out $T/$1.tsv "${@:2}"; }
label verdicts --prompt $P/hybrid.txt

stage "6  The table and the submission"
table climatecheck2025 $T/{bm25,splade,dense,hybrid,rerank,llm,verdicts}.tsv
python 06_evaluate.py submission $D $T/verdicts.tsv --task climatecheck2025
further "${1:-}"

stage "tables  Table 3: the other prompts"
label zero-shot-one-step --prompt $P/one-step.txt $(small --top-k 2)
label zero-shot-two-step --strategy two-step \
  --prompt $P/two-step-evidence.txt $P/two-step-direction.txt $(small --top-k 2)
label few-shot-hybrid --prompt $P/hybrid.txt --fewshot $T/fewshot.tsv $(small --top-k 2)
ROWS="verdicts zero-shot-one-step zero-shot-two-step few-shot-hybrid"
stage "tables  Table 3: three classifiers, two of which know SciFact; frozen, focal loss (4.2.2; 7)"
classifier() { # NAME MODEL
  python 05_classify.py train $D --model $2 --freeze encoder --sampler balanced \
    --loss weighted-focal --epochs 10 --patience 10 --lr 5e-5 --batch-size 32 --split-by instance \
    --out $WORK/models/$1 $(small --epochs 1 --max-length 96)
  python 05_classify.py $D --run $T/llm.tsv --model $WORK/models/$1 --out $T/$1.tsv \
    $(small --max-length 96)
  ROWS="$ROWS $1"
}
classifier deberta $DEBERTA
classifier deberta-scifact $DEBERTA_SCIFACT
classifier roberta-scifact $ROBERTA_SCIFACT
table climatecheck2025 $(printf "$T/%s.tsv " $ROWS) --out $T/table3.tsv
stage "tables  Table 4: RankGPT without examples"
rankgpt 0.4 llm-zero-shot
table climatecheck2025 $T/{llm,llm-zero-shot}.tsv --out $T/table4.tsv
stage "tables  Table 5: alpha; the replies are there"
ROWS=llm
for alpha in $(few 0 0.2 0.6 0.8 1); do
  rankgpt $alpha alpha-$alpha --fewshot $T/fewshot.tsv
  ROWS="$ROWS alpha-$alpha"
done
table climatecheck2025 $(printf "$T/%s.tsv " $ROWS) --out $T/table5.tsv

stage "tables  Table 6: retrievers, pairs and all three, each alone and reranked; and RankGPT"
W6=$WORK/table6
mkdir -p $W6
for run in bm25 splade dense; do cp $T/$run.tsv $W6; done
fuse() { # RETRIEVER RETRIEVER DEPTH FROM TO
  python 02_retrieve.py fuse $D --top-k $3 --out $5/$1-$2.tsv \
    $4/$1.tsv $4/$2.tsv
}
PAIRS=("bm25 splade" "bm25 dense" "splade dense")
for pair in "${PAIRS[@]}"; do fuse $pair 600 $T $W6; done
ROWS="llm rerank hybrid"
for run in $(few bm25 splade dense bm25-splade bm25-dense splade-dense); do
  rerank $W6/$run.tsv $run-rerank
  ROWS="$ROWS $run-rerank"
done
table climatecheck2025 $(printf "$T/%s.tsv " $ROWS) $W6/*.tsv --out $T/table6.tsv
stage "tables  Table 7: retrievers and their pairs by depth"
W7=$WORK/table7
python 02_retrieve.py $D --top-k 800 --out $W7
for pair in "${PAIRS[@]}"; do fuse $pair 800 $W7 $W7; done
SYSTEM="$SYSTEM:ClimateCheck 2025, Table 7" table "$(printf "R@%s00 " 1 2 4 6 8)" $W7/*.tsv \
  --out $T/table7.tsv
remarks
