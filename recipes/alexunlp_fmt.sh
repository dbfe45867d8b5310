#!/usr/bin/env bash
# Fathallah, El-Makky and Torki, "AlexUNLP-FMT at ClimateCheck Shared Task: Hybrid Retrieval with
# Adaptive Similarity Graph-based Reranking" (SDP 2025): third in subtask I. For one A100.
# Sections are those of the overview of ClimateCheck 2025.
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/alexunlp_fmt.sh tables
. "$(dirname "$0")/common.sh" climatecheck2025
DENSE=$(model BAAI/bge-large-en-v1.5 $MINILM)  # for Stella-400M, which needs trust_remote_code
NEIGHBOURS=$(model sentence-transformers/all-MiniLM-L6-v2 $MINILM)
CROSS_ENCODER=$(model cross-encoder/ms-marco-MiniLM-L12-v2 $CROSS)
[ -d "$DATA" ] || python data/download.py climatecheck --edition 2025 --out $DATA
abstracts

stage "1  BM25, and an encoder tuned on evidence, in-batch negatives (7.3; differences 11, 12)"
python 02_retrieve.py mine $D --shape tuples --hard 0 --out $WORK/train/pairs.jsonl
python 01_index.py train $D $WORK/train/pairs.jsonl --model $DENSE --loss mnrl --epochs 10 \
  --lr 1e-5 --batch-size 16 --out $WORK/models/encoder $(small --epochs 0.25 --max-length 48)
python 01_index.py $D --indexes bm25 dense --analyser nltk --dense-model $WORK/models/encoder \
  $(small --max-length 64)

stage "1  Similarity graph: 10 neighbours of every abstract, by all-MiniLM-L6-v2 (7.3)"
python 01_index.py $D --indexes dense --dense-model $NEIGHBOURS --out $WORK/index-graph \
  $(small --max-length 64)
python 01_index.py graph $D --index $WORK/index-graph/dense --neighbours 10

stage "2  Hybrid retrieval: the union of the best 50 of each (7.3)"
python 02_retrieve.py $D --retrievers bm25 dense --top-k 50
python 02_retrieve.py fuse $D --method union --top-k 100 \
  --out $T/union.tsv $T/bm25.tsv $T/dense.tsv

# rerank RUN NAME FLAGS: the best 10 of a run by the cross-encoder
rerank() {
  python 03_rerank.py $D --run $T/$1.tsv --model $CROSS_ENCODER --depth 100 --top-k 10 \
    --out $T/$2.tsv "${@:3}" $(small --depth 20 --max-length 256)
}
GRAPH="--graph $WORK/index/graph --rounds 20 --neighbours 10 --beam 30"
GRAPH="$GRAPH $(small --rounds 2 --neighbours 3 --beam 5)"
stage "3  Adaptive reranking: the best 30 bring in neighbours, 20 rounds; the best 10 (7.3; 12)"
rerank union rerank $GRAPH

stage "6  The table and the submission"
table climatecheck2025 $T/{bm25,dense,union,rerank}.tsv
python 06_evaluate.py submission $D $T/rerank.tsv --task climatecheck2025
further "${1:-}"

stage "tables  Each retriever and their union reranked, without the graph; the graph behind BM25"
for run in bm25 dense union; do rerank $run $run-rerank; done
rerank bm25 bm25-graph $GRAPH
stage "tables  The encoder without fine-tuning"
python 01_index.py $D --indexes dense --dense-model $DENSE --out $WORK/index-untuned \
  $(small --max-length 96)
python 02_retrieve.py $D --retrievers dense --top-k 50 --index $WORK/index-untuned --out $T/untuned
cp $T/untuned/dense.tsv $T/dense-untuned.tsv
table climatecheck2025 $T/{rerank,bm25,dense-untuned,dense,union}.tsv \
  $T/{bm25-rerank,dense-rerank,union-rerank,bm25-graph}.tsv --out $T/tables.tsv
