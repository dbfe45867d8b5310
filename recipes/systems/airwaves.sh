#!/usr/bin/env bash
# Ashbaugh et al., "AIRwaves at CheckThat! 2025: Retrieving Scientific Sources for Implicit Claims
# on Social Media with Dual Encoders and Neural Re-Ranking" (CLEF 2025;
# https://github.com/LeonBaum99/CLEF-2025-CheckThat-Lab): second in subtask 4b, the paper that
# a post speaks of.
# For one A100. spaCy makes the lemmas; gensim, of the tables alone, Word2Vec. The collection comes
# as a pickle, which is read on your word alone:
#   pip install spacy gensim && python -m spacy download en_core_web_sm
#   python data/download.py checkthat4b --allow-pickle
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/systems/airwaves.sh tables
. "$(dirname "$0")/common.sh" checkthat4b
. recipes/systems/airwaves_steps.sh

E5=$(model intfloat/e5-large-v2 $MINILM)
SCIBERT=$(model allenai/scibert_scivocab_uncased $CROSS)
if [ ! -d "$DATA" ]; then
  python data/download.py checkthat4b --out $DATA
fi
check "${1:-}"
SPLITS="train test"  # rerankers learn on runs of train
if [ "${1:-}" = tables ] && [ -e $DATA/qrels.dev.tsv ]; then
  SPLITS="train dev test"
fi

stage "1, 2  Section 4.1, BM25 (eq. 1) over spaCy's lemmas (difference 22)"
if [ -n "$SMALL" ]; then
  LEMMAS=$DATA  # no spaCy in a rehearsal
else
  LEMMAS=$WORK/lemmas
  python recipes/tools/texts.py $DATA $LEMMAS --lemmas en_core_web_sm
fi
bm25 bm25 $LEMMAS

stage "1, 2  Section 4.2.1, E5 with in-batch negatives on title and abstract (difference 23)"
kit recipes/train/mine.py $D --shape tuples --hard 0 --out $WORK/train/pairs.jsonl
tune e5 $E5 pairs 64

stage "3  Section 4.2.2, SciBERT reorders the first 10 of E5 (difference 24)"
rerank rerank e5 10

stage "6  The table and the submission; comparisons are with the first run, E5 (4.3)"
table metrics checkthat $T/{e5,bm25,rerank}.tsv
kit 06_evaluate.py submission $D $T/rerank.tsv --task checkthat4b
further "${1:-}"
ROWS="e5 bm25 rerank"  # of the last tables

stage "tables  Table 2: tokens of posts and records, as E5 reads them"
python recipes/tools/count_tokens.py $DATA --model $E5

stage "tables  Table 4: BM25 over the texts as they are"
bm25 bm25-raw $DATA
ROWS="$ROWS bm25-raw"

stage "tables  Table 5: Word2Vec over lemmas and texts; other encoders; E5 without fine-tuning"
if [ -z "$SMALL" ]; then
  for split in $SPLITS; do
    python recipes/tools/word2vec.py $LEMMAS --split $split --out $WORK/$split/word2vec.tsv
    python recipes/tools/word2vec.py $DATA --split $split --out $WORK/$split/word2vec-raw.tsv
  done
  ROWS="$ROWS word2vec word2vec-raw"
fi
for name in $(few all-MiniLM-L6-v2 multi-qa-mpnet-base-dot-v1 msmarco-bert-base-dot-v5); do
  tune $name $(model sentence-transformers/$name $MINILM) pairs 64
  ROWS="$ROWS $name"
done
encode e5-untuned $E5
ROWS="$ROWS e5-untuned"

stage "tables  Table 6: smaller batches"
for batch in $(few 8 16 32); do
  tune e5-batch-$batch $E5 pairs $batch
  ROWS="$ROWS e5-batch-$batch"
done

stage "tables  Table 7: chunks; in chunks, fields one by one and all (differences 23, 25)"
ALL=title,abstract,authors,journal,source
tune e5-chunks $E5 pairs 64 --pooling chunks
for field in $(few authors journal source); do
  tune e5-$field $E5 pairs 64 --pooling chunks --fields title,abstract,$field
  ROWS="$ROWS e5-$field"
done
tune e5-all $E5 pairs 64 --pooling chunks --fields $ALL
ROWS="$ROWS e5-chunks e5-all"

stage "tables  Table 8: one BM25 negative; the same with all fields in chunks (difference 25)"
kit recipes/train/mine.py $D $WORK/train/bm25.tsv --shape tuples --hard 1 --draw best \
  --out $WORK/train/hard.jsonl
tune e5-hn $E5 hard 64
tune e5-hn-all $E5 hard 64 --pooling chunks --fields $ALL
ROWS="$ROWS e5-hn e5-hn-all"

stage "tables  Tables 9 to 11: other models and batches on the first 5 of E5; depth 20"
DISTILBERT=$(model distilbert/distilbert-base-uncased $CROSS)
MEDBERT=$(model Charangan/MedBERT $CROSS)
rerank rerank-5 e5 5
rerank distilbert-5 e5 5 --model $DISTILBERT
rerank medbert-5 e5 5 --model $MEDBERT
rerank rerank-5-batch-8 e5 5 --batch-size 8
rerank rerank-20 e5 20
ROWS="$ROWS rerank-5 distilbert-5 medbert-5 rerank-5-batch-8 rerank-20"

stage "tables  Table 12: SciBERT on E5 with negatives and all fields"
rerank rerank-hn-all e5-hn-all 10
rerank rerank-hn-all-5 e5-hn-all 5
ROWS="$ROWS rerank-hn-all rerank-hn-all-5"

stage "tables  All runs, by split"
for split in $SPLITS; do
  if [ ! -e $DATA/qrels.$split.tsv ]; then
    continue
  fi
  FILES=
  for name in $ROWS; do
    FILES="$FILES $WORK/$split/$name.tsv"
  done
  kit 06_evaluate.py $D --split $split $FILES --measures checkthat --out $WORK/$split/tables.tsv
  python recipes/tools/published.py $WORK/$split/tables.json "$SYSTEM:CheckThat! 4b, $split"
done

# Question 1: e5-all against e5-chunks. Questions 2 and 3: e5-hn and rerank against e5, the first
# of the table. MRR@1 is 1 where the first rank is right, else 0, as McNemar's test needs it.
stage "tables  Section 4.3: Wilcoxon's test on MRR@5, McNemar's on the first rank"
table question1 checkthat $T/{e5-chunks,e5-all}.tsv
for name in question1 tables; do
  python recipes/tools/significance.py $T/$name.claims.tsv --measures MRR@5 MRR@1
done
remarks
