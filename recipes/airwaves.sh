#!/usr/bin/env bash
# Ashbaugh et al., "AIRwaves at CheckThat! 2025: Retrieving Scientific Sources for Implicit Claims
# on Social Media with Dual Encoders and Neural Re-Ranking" (CLEF 2025): second in subtask 4b, which
# paper does a post speak of? For one A100. The collection comes as a pickle, which is read only on
# your word: python data/download.py checkthat4b --allow-pickle
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/airwaves.sh
. "$(dirname "$0")/common.sh" checkthat4b
E5=$(model intfloat/e5-large-v2 $MINILM)
SCIBERT=$(model allenai/scibert_scivocab_uncased $CROSS)
PROMPTS=(--query-prompt "query: " --document-prompt "passage: ")
ALL=(--fields title,abstract,authors,journal,source --separator " [SEP] " --pooling chunks)
[ -d "$DATA" ] || python data/download.py checkthat4b --out $DATA

stage "1, 2  Section 4.1, BM25 (eq. 1) over spaCy's lemmas"
if [ "$SMALL" = 1 ]; then L=$D; else
  python recipes/lemmatise.py $DATA $WORK/lemmas
  L="--data $WORK/lemmas --work $WORK"
fi
python 01_index.py $L --indexes bm25 --analyser plain --bm25-method robertson --k1 1.5 --b 0.75
for split in train test; do python 02_retrieve.py $L --split $split --retrievers bm25; done

# encoder NAME EXAMPLES FLAGS: fine-tune E5, index with it, retrieve
encoder() {
  python 01_index.py train $D $2 --model $E5 "${PROMPTS[@]}" "${@:3}" --loss mnrl --scale 20 \
    --lr 7e-6 --epochs 2 --batch-size 64 --out $WORK/models/$1 \
    $(small --epochs 0.25 --max-length 96 --batch-size 16)
  python 01_index.py $D --indexes dense --dense-model $WORK/models/$1 "${PROMPTS[@]}" "${@:3}" \
    --out $WORK/index-$1 $(small --max-length 160)
  for split in train dev test; do
    [ ! -e "$DATA/claims.$split.tsv" ] ||
      python 02_retrieve.py $D --split $split --index $WORK/index-$1 --retrievers dense \
        --out $WORK/$split/$1
  done
}
stage "1, 2  Section 4.2.1, E5 with in-batch negatives on title and abstract"
python 02_retrieve.py mine $D --shape tuples --hard 0 --out $WORK/train/pairs.jsonl
encoder e5 $WORK/train/pairs.jsonl

# rerank NAME RUN DEPTH: the first DEPTH of a run by SciBERT
rerank() {
  python 03_rerank.py $D --run $2 --depth $3 --max-length 512 --out $T/$1.tsv \
    $(small --max-length 256)
}
stage "3  Section 4.2.2, SciBERT reorders the first 10 of the base E5"
python 02_retrieve.py mine $D $WORK/train/e5/dense.tsv --hard 8 --from-top 20 --draw best \
  --out $WORK/train/rerank.jsonl $(small --hard 2)
python 03_rerank.py train $D $WORK/train/rerank.jsonl --model $SCIBERT --loss bce --epochs 3 \
  --lr 2e-5 --batch-size 16 --max-length 512 --dev-run $WORK/dev/e5/dense.tsv --dev-depth 10 \
  $(small --epochs 1 --max-length 64)
rerank rerank $T/e5/dense.tsv 10

stage "6  The table and the submission; comparisons are with the base E5 (section 5.3)"
cp $T/e5/dense.tsv $T/e5.tsv
table checkthat $T/{e5,bm25,rerank}.tsv
python 06_evaluate.py submission $D $T/rerank.tsv --task checkthat4b
[ "${1:-}" = tables ] || exit 0

stage "tables  One BM25 negative; all fields, long records in chunks, in training, too"
python 02_retrieve.py mine $D $WORK/train/bm25.tsv --shape tuples --hard 1 --draw best \
  --out $WORK/train/hard.jsonl
encoder e5-hn $WORK/train/hard.jsonl
encoder e5-hn-all $WORK/train/hard.jsonl "${ALL[@]}"
for name in e5-hn e5-hn-all; do cp $T/$name/dense.tsv $T/$name.tsv; done
stage "tables  SciBERT on the first 5, 10 and 20"
for k in 5 20; do rerank rerank-$k $T/e5/dense.tsv $k; done
rerank rerank-hn-all $T/e5-hn-all/dense.tsv 10
rerank rerank-hn-all-5 $T/e5-hn-all/dense.tsv 5
stage "tables  BM25 over the texts as they are"
python 01_index.py $D --indexes bm25 --analyser plain --bm25-method robertson \
  --out $WORK/index-raw
python 02_retrieve.py $D --retrievers bm25 --index $WORK/index-raw --out $T/raw
cp $T/raw/bm25.tsv $T/bm25-raw.tsv
table checkthat $T/{e5,bm25-raw,bm25,e5-hn,e5-hn-all}.tsv $T/rerank*.tsv --out $T/tables.tsv
