#!/bin/sh
# What `make demo` runs, with a heading before each command. Files go to demo/, which is made anew. Needs `gnomon` and
# `python` on the PATH, with torch and tokenizers. Takes under two minutes on two idle cores, most of it measuring and
# training. The model, its tokenizer and its first weights are made here: no package ships a small language model.
set -eu
cd "$(dirname "$0")/.."
rm -rf demo
mkdir demo
GNOMON_HOME=$PWD/demo
export GNOMON_HOME
PROMPT='The following'

# Prints the command as it would be typed, broken before an option where the line is full, and runs it.
step() {
    printf '\n\n== %s\n\n' "$1"
    shift
    line='$ gnomon'
    for word in "$@"; do
        case $word in
        *' '*) word="'$word'" ;;
        esac
        case $word in
        --*)
            if [ ${#line} -gt 56 ]; then
                printf '%s \\\n' "$line"
                line='     '
            fi
            ;;
        esac
        line="$line $word"
    done
    printf '%s\n\n' "$line"
    gnomon "$@"
}

printf 'Each command can be repeated by hand, here, after:\n$ export GNOMON_HOME=%s\n' "$GNOMON_HOME"

step 'Predict: Llama-3.1-8B on 4 nodes of 8 H100, laid out by hand' \
    predict llama-3.1-8b --on 4x8xh100-sxm --stack megatron-lm --tp 2 --sequence-parallel --zero 1 \
    --micro-batch-size 2 --global-batch 128 --seq-len 8192

step 'Plan: what would be the fastest layout?' \
    plan llama-3.1-8b --on 4x8xh100-sxm --stack megatron-lm --global-batch 128 --seq-len 8192 \
    -o demo/llama-3.1-8b.toml

step 'Measure this machine, with two processes' \
    calibrate --processes 2 --seconds 15

printf '\n\n== A tokenizer and the config.json of a small Llama, made here; code and prose of the Python distribution\n\n'
printf '$ python scripts/demo_model.py demo\n'
python scripts/demo_model.py demo

step 'Plan it for this machine' \
    plan demo/model --on local --global-batch 8 --seq-len 128 --precision fp32 -o demo/plan.toml

step 'Train it from random weights on code, and write a folder of safetensors' \
    run demo/plan.toml --data demo/code --tokenizer demo/model --steps 120 --lr 3e-3 --export demo/pretrained

step 'What it writes' \
    generate demo/pretrained --prompt "$PROMPT" --count 32 --temperature 0.7

step 'Predict the plan' \
    predict --plan demo/plan.toml --timeline demo/predicted.timeline

step 'Fine-tune that folder on prose, by the same plan' \
    run demo/plan.toml --weights demo/pretrained --data demo/prose.jsonl --tokenizer demo/pretrained --steps 80 \
    --lr 2e-3 --checkpoints demo/checkpoints --export demo/tuned --timeline demo/measured.timeline

step 'What it writes now' \
    generate demo/tuned --prompt "$PROMPT" --count 32 --temperature 0.7

step 'Compare: where does the prediction differ from what happened?' \
    compare demo/predicted.timeline demo/measured.timeline

step 'Write it as a page, and as a trace' \
    report demo/predicted.timeline demo/measured.timeline --plan demo/plan.toml -o demo/report.html \
    --trace demo/trace.json

printf '\n\nOpen  demo/report.html  in a browser, and  demo/trace.json  in ui.perfetto.dev.\n'
