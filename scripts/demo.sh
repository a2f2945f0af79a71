#!/bin/sh
# What `make demo` runs, with a heading before each command. Files go to demo/, which is made anew. Needs `gnomon` on
# the PATH, with torch. Takes about two minutes on two cores, most of it measuring and training.
set -eu
cd "$(dirname "$0")/.."
rm -rf demo
mkdir demo
GNOMON_HOME=$PWD/demo
export GNOMON_HOME

# Prints the command as it would be typed, broken before an option where the line is full, and runs it.
step() {
    printf '\n\n== %s\n\n' "$1"
    shift
    line='$ gnomon'
    for word in "$@"; do
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
    calibrate --processes 2

step 'Plan a small Llama for it' \
    plan llama-tiny --on local --global-batch 16 --seq-len 128 --precision fp32 -o demo/plan.toml

step 'Predict that plan' \
    predict --plan demo/plan.toml --timeline demo/predicted.timeline

step 'Train by it for real, on the source of the Python standard library' \
    run demo/plan.toml --steps 60 --checkpoints demo/checkpoints --timeline demo/measured.timeline

step 'Compare: where does the prediction differ from what happened?' \
    compare demo/predicted.timeline demo/measured.timeline

step 'Write it as a page, and as a trace' \
    report demo/predicted.timeline demo/measured.timeline --plan demo/plan.toml -o demo/report.html \
    --trace demo/trace.json

printf '\n\nOpen  demo/report.html  in a browser, and  demo/trace.json  in ui.perfetto.dev.\n'
