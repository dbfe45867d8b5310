#!/usr/bin/env bash
# Ashbaugh et al., "AIRwaves at CheckThat! 2025: Retrieving Scientific Sources for Implicit Claims
# on Social Media with Dual Encoders and Neural Re-Ranking" (CLEF 2025): second in subtask 4b, which
# paper does a post speak of? For one A100. The collection comes as a pickle, which is read only on
# your word: python data/download.py checkthat4b --allow-pickle
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/airwaves.sh tables
. "$(dirname "$0")/common.sh" checkthat4b
E5=$(model intfloat/e5-large-v2 $MINILM)
SCIBERT=$(model allenai/scibert_scivocab_uncased $CROSS)
TWO=(--fields title,abstract --separator " [SEP] ")
ALL=(--fields title,abstract,authors,journal,source --separator " [SEP] " --pooling chunks)
[ -d "$DATA" ] || python data/download.py checkthat4b --out $DATA

ROWS=""  # what has been made
# bm25 NAME FLAGS: their equation 1; dense NAME FLAGS: index with an encoder, retrieve
bm25() {
  python 01_index.py "${@:2}" --indexes bm25 --analyser plain --bm25-method robertson --k1 1.5 \
    --b 0.75 --out $WORK/index-$1
  python 02_retrieve.py "${@:2}" --retrievers bm25 --index $WORK/index-$1 --out $T/$1
  cp $T/$1/bm25.tsv $T/$1.tsv
  ROWS="$ROWS $1"
}
dense() {
  python 01_index.py $D --indexes dense --out $WORK/index-$1 "${@:2}" $(small --max-length 160)
  python 02_retrieve.py $D --retrievers dense --index $WORK/index-$1 --out $T/$1
  cp $T/$1/dense.tsv $T/$1.tsv
  ROWS="$ROWS $1"
}
# tune NAME MODEL EXAMPLES BATCH FLAGS: fine-tune an encoder, index with it, retrieve
tune() {
  python 01_index.py train $D $WORK/train/$3.jsonl --model $2 --loss mnrl --scale 20 --lr 7e-6 \
    --epochs 2 --batch-size $4 --dev-split none --out $WORK/models/$1 "${@:5}" \
    $(small --epochs 0.25 --max-length 96 --batch-size 16)
  dense $1 --dense-model $WORK/models/$1 "${@:5}"
}
# scibert NAME ENCODER DEPTH: SciBERT learns on the encoder's first DEPTH, and reorders them
scibert() {
  python 02_retrieve.py $D --split train --retrievers dense --index $WORK/index-$2 \
    --out $WORK/train/$2
  python 02_retrieve.py mine $D $WORK/train/$2/dense.tsv --hard $3 --from-top $3 --draw best \
    --out $WORK/train/$1.jsonl $(small --hard 2)
  python 03_rerank.py train $D $WORK/train/$1.jsonl --model $SCIBERT --loss bce --epochs 3 \
    --lr 2e-5 --batch-size 16 --max-length 512 --dev-split none --out $WORK/models/$1 \
    $(small --epochs 1 --max-length 64)
  python 03_rerank.py $D --run $T/$2.tsv --depth $3 --model $WORK/models/$1 --max-length 512 \
    --out $T/$1.tsv $(small --max-length 256)
  ROWS="$ROWS $1"
}
stage "1, 2  Section 4.1, BM25 (eq. 1) over spaCy's lemmas"
LEMMAS=$WORK/lemmas
if [ "$SMALL" = 1 ]; then LEMMAS=$DATA; else python recipes/tools/lemmatise.py $DATA $LEMMAS; fi
bm25 bm25 --data $LEMMAS --work $WORK
stage "1, 2  Section 4.2.1, E5 with in-batch negatives on title and abstract"
python 02_retrieve.py mine $D --shape tuples --hard 0 --out $WORK/train/pairs.jsonl
tune e5 $E5 pairs 64 "${TWO[@]}"
stage "3  Section 4.2.2, SciBERT reorders the first 10 of E5"
scibert rerank e5 10

stage "6  The table and the submission; comparisons are with E5 (section 5.3)"
table checkthat $T/{e5,bm25,rerank}.tsv
python 06_evaluate.py submission $D $T/rerank.tsv --task checkthat4b
further "${1:-}"

stage "tables  Table 2: tokens of posts and of the collection's fields"
python recipes/tools/count_tokens.py $DATA --model $E5
stage "tables  BM25 over the texts as they are; Word2Vec over texts and lemmas"
bm25 bm25-raw $D
if [ "$SMALL" != 1 ]; then
  python recipes/tools/word2vec.py $DATA --out $T/word2vec-raw.tsv
  python recipes/tools/word2vec.py $LEMMAS --out $T/word2vec.tsv
  ROWS="$ROWS word2vec-raw word2vec"
fi
stage "tables  Table 1: other encoders, E5 without fine-tuning, smaller batches"
dense e5-untuned --dense-model $E5 "${TWO[@]}"
for name in $(few all-MiniLM-L6-v2 multi-qa-mpnet-base-dot-v1 msmarco-bert-base-dot-v5); do
  tune $name $(model sentence-transformers/$name $MINILM) pairs 64 "${TWO[@]}"
done
for batch in $(few 8 16 32); do tune e5-batch-$batch $E5 pairs $batch "${TWO[@]}"; done
stage "tables  Chunks; fields one by one, long records in chunks, in training, too"
tune e5-chunks $E5 pairs 64 "${TWO[@]}" --pooling chunks
for field in $(few authors journal source); do
  tune e5-$field $E5 pairs 64 "${ALL[@]}" --fields title,abstract,$field
done
tune e5-all $E5 pairs 64 "${ALL[@]}"
stage "tables  One BM25 negative; with all fields in chunks"
python 02_retrieve.py --data $LEMMAS --work $WORK --split train --retrievers bm25 \
  --index $WORK/index-bm25
python 02_retrieve.py mine $D $WORK/train/bm25.tsv --shape tuples --hard 1 --draw best \
  --out $WORK/train/hard.jsonl
tune e5-hn $E5 hard 64 "${TWO[@]}"
tune e5-hn-all $E5 hard 64 "${ALL[@]}"
stage "tables  SciBERT on the first 5 and 20, and on E5 with negatives and all fields"
for depth in $(few 5 20); do scibert rerank-$depth e5 $depth; done
scibert rerank-hn-all e5-hn-all 10
scibert rerank-hn-all-5 e5-hn-all 5
stage "tables  Section 5.3: Wilcoxon's test on MRR@5, McNemar's on the first rank, both against E5"
table checkthat $T/e5.tsv $(printf "$T/%s.tsv " $ROWS) --out $T/tables.tsv
if [ -e $T/tables.claims.tsv ]; then
  python recipes/tools/significance.py $T/tables.claims.tsv --measures MRR@5 Success@1
fi
