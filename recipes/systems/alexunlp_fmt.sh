#!/usr/bin/env bash
# Fathallah, El-Makky and Torki, "AlexUNLP-FMT at ClimateCheck Shared Task: Hybrid Retrieval with
# Adaptive Similarity Graph-based Reranking" (SDP 2025;
# https://github.com/Mahmoud-Mohammed-Fathallah/climatecheck-shared-task): third in subtask I. For
# one A100. Sections are those of the overview of ClimateCheck 2025.
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/systems/alexunlp_fmt.sh tables
. "$(dirname "$0")/common.sh" climatecheck2025

DENSE=$(model BAAI/bge-large-en-v1.5 $MINILM)  # for Stella-400M, which needs trust_remote_code
NEIGHBOURS=$(model sentence-transformers/all-MiniLM-L6-v2 $MINILM)
CROSS_ENCODER=$(model cross-encoder/ms-marco-MiniLM-L12-v2 $CROSS)
if [ ! -d "$DATA" ]; then
  python data/download.py climatecheck --edition 2025 --out $DATA
fi
check "${1:-}"
abstracts

stage "1  BM25, and an encoder tuned on evidence, in-batch negatives (7.3; differences 13, 14)"
kit recipes/train/mine.py $D --shape tuples --hard 0 --out $WORK/train/pairs.jsonl
kit recipes/train/encoder.py $D $WORK/train/pairs.jsonl --model $DENSE --loss mnrl --epochs 10 \
  --lr 1e-5 --batch-size 16 --out $WORK/models/encoder
kit 01_index.py $D --indexes bm25 dense --analyser unstemmed --dense-model $WORK/models/encoder

stage "1  Similarity graph: 10 neighbours of every abstract, by all-MiniLM-L6-v2 (7.3)"
kit 01_index.py $D --indexes dense --dense-model $NEIGHBOURS --out $WORK/index-graph
kit 01_index.py graph $D --index $WORK/index-graph/dense --neighbours 10

stage "2  Hybrid retrieval: the union of the best 50 of each (7.3)"
kit 02_retrieve.py $D --retrievers bm25 dense --top-k 50
kit 02_retrieve.py fuse $D --method union --top-k 100 --out $T/union.tsv $T/{bm25,dense}.tsv

# rerank RUN NAME: the best 10 by the cross-encoder
rerank() {
  local run=$1 name=$2
  kit 03_rerank.py $D --run $T/$run.tsv --model $CROSS_ENCODER --depth 100 --top-k 10 \
    --out $T/$name.tsv
}

# rerank_by_graph RUN NAME: the same in 20 rounds; from the second on, the best 30 have brought in
# their neighbours
rerank_by_graph() {
  local run=$1 name=$2
  kit 03_rerank.py $D --run $T/$run.tsv --model $CROSS_ENCODER --depth 100 --top-k 10 \
    --graph $WORK/index/graph --neighbours 10 --beam 30 --rounds 19 --out $T/$name.tsv
}

stage "3  Adaptive reranking: the best 30 bring in neighbours, 20 rounds (7.3; difference 14)"
rerank_by_graph union rerank

stage "6  The table and the submission"
table metrics climatecheck2025 $T/{bm25,dense,union,rerank}.tsv
kit 06_evaluate.py submission $D $T/rerank.tsv --task climatecheck2025
further "${1:-}"

stage "tables  Each retriever and their union reranked, without the graph; the graph behind BM25"
rerank bm25 bm25-rerank
rerank dense dense-rerank
rerank union union-rerank
rerank_by_graph bm25 bm25-graph

stage "tables  The encoder without fine-tuning"
kit 01_index.py $D --indexes dense --dense-model $DENSE --out $WORK/index-untuned
kit 02_retrieve.py $D --retrievers dense --top-k 50 --index $WORK/index-untuned --out $T/untuned
cp $T/untuned/dense.tsv $T/dense-untuned.tsv
table tables climatecheck2025 $T/{rerank,bm25,dense-untuned,dense,union}.tsv \
  $T/{bm25-rerank,dense-rerank,union-rerank,bm25-graph}.tsv
