#!/usr/bin/env bash
# Kiepura & Lam, "ClimateCheck2025: Multi-Stage Retrieval Meets LLMs for Automated Scientific
# Fact-Checking" (SDP 2025; https://github.com/annamkiepura/ClimateCheck): second in ClimateCheck
# 2025, first in Recall@2. For one A100, OPENAI_API_KEY, and HF_TOKEN for naver/splade-v3 (gated).
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/systems/kiepura_lam.sh tables
. "$(dirname "$0")/common.sh" climatecheck2025

DENSE=$(model BAAI/bge-m3 $MINILM)
SPLADE=$(model naver/splade-v3 $SPLADE_TINY)
CROSS_ENCODER=$(model cross-encoder/ms-marco-MiniLM-L6-v2 $CROSS)
GPT=$(llm gpt-4.1)
if [ ! -d "$DATA" ]; then
  python data/download.py climatecheck --edition 2025 --out $DATA
fi
check "${1:-}"
abstracts

stage "1  Indexes: BM25 and SPLADE-v3 (4.1.1, eq. 2: ReLU without logarithm; differences 5, 8)"
kit 01_index.py $D --indexes bm25 splade --analyser words --splade-model $SPLADE --activation relu \
  --batch-size 128

stage "1  BGE-M3, tuned on triplets with random NEI abstracts of any claim (4.1.1; difference 9)"
kit recipes/train/mine.py $D --shape tuples --pool nei --hard 0 --from-top 0 --easy 1 \
  --out $WORK/train/triplets.jsonl
kit recipes/train/encoder.py $D $WORK/train/triplets.jsonl --model $DENSE --max-length 8192 \
  --loss triplet --margin 0.3 --epochs 3 --lr 5e-5 --weight-decay .01 --batch-size 2 --accumulate 32
kit 01_index.py $D --indexes dense --dense-model $WORK/models/encoder --max-length 8192 \
  --batch-size 8

stage "2  Reciprocal rank fusion, k = 60: the best 600; to train cross-encoders, 200 (4.1.1, 4.1.2)"
kit 02_retrieve.py $D --split train --top-k 200 --rrf-k 60
kit 02_retrieve.py $D --top-k 600 --rrf-k 60

# train RUN MODEL EPOCHS NAME: negatives are NEI of any claim, the first 4 of 200, and 4 at random
train() {
  local run=$1 model=$2 epochs=$3 name=$4
  kit recipes/train/mine.py $D $WORK/train/$run.tsv --pool nei --from-top 200 --hard 4 --draw best \
    --easy 4 --out $WORK/train/$name.jsonl
  kit recipes/train/reranker.py $D $WORK/train/$name.jsonl --model $model --loss bce \
    --epochs $epochs --lr 2e-5 --batch-size 16 --out $WORK/models/$name
}

stage "3  Cross-encoder, phase 2 with negatives that phase 1 ranks high (4.1.2; differences 6, 10)"
train hybrid $CROSS_ENCODER 3 phase1
kit 03_rerank.py $D --split train --run $WORK/train/hybrid.tsv --model $WORK/models/phase1 \
  --depth 200 --out $WORK/train/phase1.tsv
train phase1 $WORK/models/phase1 2 phase2

stage "3  Reranking: the best 20 (4.1.2)"
# rerank RUN NAME
rerank() {
  local run=$1 name=$2
  kit 03_rerank.py $D --run $T/$run.tsv --model $WORK/models/phase2 --depth ${DEPTH:-600} \
    --top-k 20 --out $T/$name.tsv
}
rerank hybrid rerank

stage "4  RankGPT: GPT-4.1 orders the 20 in one window; alpha = 0.4 (4.1.3; differences 1, 8)"
# rankgpt ALPHA NAME FLAGS: the best 10; alpha weighs ranks that are asked for once
rankgpt() {
  local alpha=$1 name=$2
  shift 2
  kit 04_llm_rerank.py $D --run $T/rerank.tsv --depth 20 --window 20 --alpha $alpha --top-k 10 \
    --prompt $PROMPTS/ranking.txt $GPT --replies $T/llm.replies.jsonl --out $T/$name.tsv "$@"
}
kit recipes/tools/fewshot.py $D --number 6
rankgpt 0.4 llm --fewshot $T/fewshot.tsv

stage "5  Stance: GPT-4.1, two questions in a prompt, no examples (4.2.1, appendix C; difference 1)"
kit 05_classify.py llm $D --run $T/llm.tsv --prompt $PROMPTS/hybrid.txt $GPT \
  --out $T/verdicts.tsv

stage "6  The table and the submission"
table metrics climatecheck2025 $T/{bm25,splade,dense,hybrid,rerank,llm,verdicts}.tsv
kit 06_evaluate.py submission $D $T/verdicts.tsv --task climatecheck2025
further "${1:-}"

stage "tables  Table 3: the other prompts"
# label NAME FLAGS
label() {
  local name=$1
  shift
  kit 05_classify.py llm $D --run $T/llm.tsv $GPT --out $T/$name.tsv "$@"
}
label zero-shot-one-step --prompt $PROMPTS/one-step.txt
label zero-shot-two-step --strategy two-step \
  --prompt $PROMPTS/two-step-evidence.txt $PROMPTS/two-step-direction.txt
label few-shot-hybrid --prompt $PROMPTS/hybrid.txt --fewshot $T/fewshot.tsv

stage "tables  Table 3: three classifiers, two of which know SciFact (4.2.2; difference 7)"
# classifier NAME MODEL
classifier() {
  local name=$1 model=$2
  kit recipes/train/classifier.py $D --model $model --freeze encoder --sampler balanced \
    --loss weighted-focal --epochs 10 --patience 10 --lr 5e-5 --batch-size 32 --split-by instance \
    --out $WORK/models/$name
  kit 05_classify.py $D --run $T/llm.tsv --model $WORK/models/$name --out $T/$name.tsv
}
classifier deberta $(model MoritzLaurer/DeBERTa-v3-base-mnli $NLI)
classifier deberta-scifact $(model jedick/DeBERTa-v3-base-mnli-fever-anli-scifact-citint $NLI)
classifier roberta-scifact $(model nikolamilosevic/SCIFACT_xlm_roberta_large $NLI)
table table3 climatecheck2025 \
  $T/{verdicts,zero-shot-one-step,zero-shot-two-step,few-shot-hybrid}.tsv \
  $T/{deberta,deberta-scifact,roberta-scifact}.tsv

stage "tables  Table 4: RankGPT without examples"
rankgpt 0.4 llm-zero-shot
table table4 climatecheck2025 $T/{llm,llm-zero-shot}.tsv

stage "tables  Table 5: alpha; the replies are there"
for alpha in 0 0.2 0.6 0.8 1; do
  rankgpt $alpha alpha-$alpha --fewshot $T/fewshot.tsv
done
table table5 climatecheck2025 $T/{llm,alpha-0,alpha-0.2,alpha-0.6,alpha-0.8,alpha-1}.tsv

stage "tables  Table 6: retrievers, pairs and all three, each alone and reranked; and RankGPT"
# fuse FOLDER FIRST SECOND DEPTH: two runs of a folder
fuse() {
  local folder=$1 first=$2 second=$3 depth=$4
  kit 02_retrieve.py fuse $D --top-k $depth --out $folder/$first-$second.tsv \
    $folder/$first.tsv $folder/$second.tsv
}
fuse $T bm25 splade 600
fuse $T bm25 dense 600
fuse $T splade dense 600
for run in bm25 splade dense bm25-splade bm25-dense splade-dense; do
  rerank $run $run-rerank
done
table table6 climatecheck2025 $T/{llm,rerank,hybrid}.tsv \
  $T/{bm25,splade,dense,bm25-splade,bm25-dense,splade-dense}{,-rerank}.tsv

stage "tables  Table 7: retrievers, their pairs and all three, of lists that are cut at each depth"
PUBLISHED="kiepura_lam:ClimateCheck 2025, Table 7"
for depth in 100 200 400 600 800; do
  LISTS=$WORK/table7/$depth
  kit 02_retrieve.py $D --top-k $depth --out $LISTS
  fuse $LISTS bm25 splade $depth
  fuse $LISTS bm25 dense $depth
  fuse $LISTS splade dense $depth
  table table7-$depth R@$depth \
    $LISTS/{bm25,splade,dense,bm25-splade,bm25-dense,splade-dense,hybrid}.tsv
done
remarks
