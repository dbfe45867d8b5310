# The steps of airwaves.sh, a function each. They take $SCIBERT and $SPLITS from there.

# search NAME KIND DATA: search the index NAME for the posts of all splits, by bm25 or dense.
search() {
  local name=$1 kind=$2 data=$3
  local split
  for split in $SPLITS; do
    kit 02_retrieve.py --data $data --work $WORK --split $split --retrievers $kind --top-k 100 \
      --index $WORK/index-$name --out $WORK/$split/$name
    cp $WORK/$split/$name/$kind.tsv $WORK/$split/$name.tsv
  done
}

# bm25 NAME DATA: BM25 by their equation 1, over the words of a data folder.
bm25() {
  local name=$1 data=$2
  kit 01_index.py --data $data --work $WORK --indexes bm25 --analyser plain \
    --bm25-method robertson --k1 1.5 --b 0.75 --out $WORK/index-$name
  search $name bm25 $data
}

# What encoders read: title and abstract, and no "query: " before a post, whatever the model's own
# configuration says.
TEXTS=(--fields title,abstract --separator " [SEP] " --query-prompt "" --document-prompt "")

# encode NAME MODEL FLAGS: index with an encoder, and search. Flags may name other texts.
encode() {
  local name=$1 model=$2
  shift 2
  kit 01_index.py $D --indexes dense --dense-model $model "${TEXTS[@]}" \
    --out $WORK/index-$name "$@"
  search $name dense $DATA
}

# tune NAME MODEL EXAMPLES BATCH FLAGS: fine-tune an encoder on train, index with it, and search.
# Flags are those of encode.
tune() {
  local name=$1 model=$2 examples=$3 batch=$4
  shift 4
  kit recipes/train/encoder.py $D $WORK/train/$examples.jsonl --model $model "${TEXTS[@]}" \
    --loss mnrl --scale 20 --lr 7e-6 --epochs 2 --batch-size $batch --dev-split none \
    --weight-decay 0.02 --out $WORK/models/$name "$@"
  encode $name $WORK/models/$name "$@"
}

# rerank NAME ENCODER DEPTH FLAGS: train a reranker on the first ranks of an encoder, and reorder
# as many. Flags are for training.
rerank() {
  local name=$1 encoder=$2 depth=$3
  shift 3
  local split
  kit recipes/train/mine.py $D $WORK/train/$encoder.tsv --hard $depth --from-top $depth \
    --draw best --out $WORK/train/$name.jsonl
  kit recipes/train/reranker.py $D $WORK/train/$name.jsonl --model $SCIBERT --loss bce --epochs 3 \
    --lr 2e-5 --batch-size 16 --max-length 512 --dev-split none --out $WORK/models/$name "$@"
  for split in $SPLITS; do
    kit 03_rerank.py $D --split $split --run $WORK/$split/$encoder.tsv --depth $depth \
      --model $WORK/models/$name --max-length 512 --out $WORK/$split/$name.tsv
  done
}
