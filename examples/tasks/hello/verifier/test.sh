#!/bin/sh
# The greeting, with or without the newline at its end.
reward=0
if [ -f /app/hello.txt ] && [ "$(cat /app/hello.txt)" = "Hello, world!" ]; then
    reward=1
fi
echo "reward $reward"
echo "$reward" > /logs/verifier/reward.txt
