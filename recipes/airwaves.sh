#!/usr/bin/env bash
# Ashbaugh et al., "AIRwaves at CheckThat! 2025: Retrieving Scientific Sources for Implicit Claims
# on Social Media with Dual Encoders and Neural Re-Ranking" (CLEF 2025;
# https://github.com/LeonBaum99/CLEF-2025-CheckThat-Lab): second in subtask 4b, the paper that
# a post speaks of. For one A100. The collection comes as a pickle, which is read on your word
# alone: python data/download.py checkthat4b --allow-pickle
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/airwaves.sh tables
. "$(dirname "$0")/common.sh" checkthat4b
E5=$(model intfloat/e5-large-v2 $MINILM)
SCIBERT=$(model allenai/scibert_scivocab_uncased $CROSS)
DISTILBERT=$(model distilbert/distilbert-base-uncased $CROSS)
MEDBERT=$(model Charangan/MedBERT $CROSS)
TWO=(--fields title,abstract --separator " [SEP] ")
ALL=(--fields title,abstract,authors,journal,source --separator " [SEP] " --pooling chunks)
LEMMAS=$WORK/lemmas
[ -d "$DATA" ] || python data/download.py checkthat4b --out $DATA
SPLITS="train test"  # rerankers learn on runs of train; tables have dev, too
if [ "${1:-}" = tables ] && [ -e $DATA/qrels.dev.tsv ]; then SPLITS="train dev test"; fi

retrieve() { # NAME KIND FLAGS: search an index for the posts of all splits
  for split in $SPLITS; do
    python 02_retrieve.py "${@:3}" --split $split --retrievers $2 --top-k 100 \
      --index $WORK/index-$1 --out $WORK/$split/$1
    cp $WORK/$split/$1/$2.tsv $WORK/$split/$1.tsv
  done
}
bm25() { # NAME DATA: their equation 1
  python 01_index.py --data $2 --work $WORK --indexes bm25 --analyser plain \
    --bm25-method robertson --k1 1.5 --b 0.75 --out $WORK/index-$1
  retrieve $1 bm25 --data $2 --work $WORK
}
dense() { # NAME FLAGS: index with an encoder
  python 01_index.py $D --indexes dense --out $WORK/index-$1 "${@:2}" $(small --max-length 160)
  retrieve $1 dense $D
}
tune() { # NAME MODEL EXAMPLES BATCH FLAGS: fine-tune an encoder, and index with it
  python 01_index.py train $D $WORK/train/$3.jsonl --model $2 --loss mnrl --scale 20 --lr 7e-6 \
    --epochs 2 --batch-size $4 --dev-split none --out $WORK/models/$1 "${@:5}" \
    $(small --epochs 0.25 --max-length 96 --batch-size 16)
  dense $1 --dense-model $WORK/models/$1 "${@:5}"
}
rerank() { # NAME ENCODER DEPTH FLAGS: a model learns on an encoder's first DEPTH, and reorders
  python 02_retrieve.py mine $D $WORK/train/$2.tsv --hard $3 --from-top $3 --draw best \
    --out $WORK/train/$1.jsonl $(small --hard 2)
  python 03_rerank.py train $D $WORK/train/$1.jsonl --model $SCIBERT --loss bce --epochs 3 \
    --lr 2e-5 --batch-size 16 --max-length 512 --dev-split none --out $WORK/models/$1 "${@:4}" \
    $(small --epochs 1 --max-length 96)
  for split in $SPLITS; do
    python 03_rerank.py $D --split $split --run $WORK/$split/$2.tsv --depth $3 \
      --model $WORK/models/$1 --max-length 512 --out $WORK/$split/$1.tsv $(small --max-length 256)
  done
}
stage "1, 2  Section 4.1, BM25 (eq. 1) over spaCy's lemmas (difference 19)"
if [ "$SMALL" = 1 ]; then LEMMAS=$DATA
else python recipes/tools/texts.py $DATA $LEMMAS --lemmas en_core_web_sm; fi
bm25 bm25 $LEMMAS
stage "1, 2  Section 4.2.1, E5 with in-batch negatives on title and abstract (difference 20)"
python 02_retrieve.py mine $D --shape tuples --hard 0 --out $WORK/train/pairs.jsonl
tune e5 $E5 pairs 64 "${TWO[@]}"
stage "3  Section 4.2.2, SciBERT reorders the first 10 of E5 (difference 21)"
rerank rerank e5 10

stage "6  The table and the submission; comparisons are with the first run, E5 (4.3)"
table checkthat $T/{e5,bm25,rerank}.tsv
python 06_evaluate.py submission $D $T/rerank.tsv --task checkthat4b
further "${1:-}"

stage "tables  Table 2: tokens of posts and records, as E5 reads them"
python recipes/tools/count_tokens.py $DATA --model $E5
stage "tables  Table 4: BM25 over the texts as they are"
bm25 bm25-raw $DATA
stage "tables  Table 5: Word2Vec over lemmas and texts; other encoders; E5 without fine-tuning"
WORD2VEC=
if [ "$SMALL" != 1 ]; then
  WORD2VEC="word2vec word2vec-raw"
  for split in $SPLITS; do
    python recipes/tools/word2vec.py $LEMMAS --split $split --out $WORK/$split/word2vec.tsv
    python recipes/tools/word2vec.py $DATA --split $split --out $WORK/$split/word2vec-raw.tsv
  done
fi
ENCODERS=$(few all-MiniLM-L6-v2 multi-qa-mpnet-base-dot-v1 msmarco-bert-base-dot-v5)
for name in $ENCODERS; do
  tune $name $(model sentence-transformers/$name $MINILM) pairs 64 "${TWO[@]}"
done
dense e5-untuned --dense-model $E5 "${TWO[@]}"
stage "tables  Table 6: smaller batches"
BATCHES=$(few 8 16 32)
for batch in $BATCHES; do tune e5-batch-$batch $E5 pairs $batch "${TWO[@]}"; done
stage "tables  Table 7: chunks; in chunks, fields one by one and all"
FIELDS=$(few authors journal source)
tune e5-chunks $E5 pairs 64 "${TWO[@]}" --pooling chunks
for field in $FIELDS; do
  tune e5-$field $E5 pairs 64 "${ALL[@]}" --fields title,abstract,$field
done
tune e5-all $E5 pairs 64 "${ALL[@]}"
stage "tables  Table 8: one BM25 negative; the same with all fields in chunks"
python 02_retrieve.py mine $D $WORK/train/bm25.tsv --shape tuples --hard 1 --draw best \
  --out $WORK/train/hard.jsonl
tune e5-hn $E5 hard 64 "${TWO[@]}"
tune e5-hn-all $E5 hard 64 "${ALL[@]}"
stage "tables  Tables 9 to 11: other models and batches on the first 5 of E5; depth 20"
rerank rerank-5 e5 5
rerank distilbert-5 e5 5 --model $DISTILBERT
rerank medbert-5 e5 5 --model $MEDBERT
rerank rerank-5-batch-8 e5 5 --batch-size 8
rerank rerank-20 e5 20
stage "tables  Table 12: SciBERT on E5 with negatives and all fields"
rerank rerank-hn-all e5-hn-all 10
rerank rerank-hn-all-5 e5-hn-all 5

stage "tables  All runs, by split"
ROWS="e5 bm25 bm25-raw $WORD2VEC $ENCODERS e5-untuned $(printf "e5-batch-%s " $BATCHES) e5-chunks
  $(printf "e5-%s " $FIELDS) e5-all e5-hn e5-hn-all rerank rerank-5 distilbert-5 medbert-5
  rerank-5-batch-8 rerank-20 rerank-hn-all rerank-hn-all-5"
table checkthat $(printf "$T/%s.tsv " $ROWS) --out $T/tables.tsv
for split in ${SPLITS% test}; do
  [ ! -e $DATA/qrels.$split.tsv ] || SYSTEM="$SYSTEM:CheckThat! 4b, $split" table checkthat \
    $(printf "$WORK/$split/%s.tsv " $ROWS) --split $split --out $WORK/$split/tables.tsv
done
# Questions: 1, e5-all against e5-chunks; 2 and 3, e5-hn and rerank against e5. Success@1 is MRR@1.
stage "tables  Section 4.3: Wilcoxon's test on MRR@5, McNemar's on the first rank"
table checkthat $T/{e5-chunks,e5-all}.tsv --out $T/question1.tsv
for table in question1 tables; do
  python recipes/tools/significance.py $T/$table.claims.tsv --measures MRR@5 Success@1
done
remarks
