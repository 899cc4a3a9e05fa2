"""The scripted model: a YAML file of weighted replies that behaves like a served policy.

It answers chat completions with exact token ids and the log-probabilities of its own choices,
so that a whole training loop runs with no key, no GPU and no download, the same way each time.

    model: half-life            # name it is served under; default: the file's name
    context: 32768              # tokens it takes before refusing; default: no limit
    version: "7"                # sent as x-policy-version; default: none
    turns:                      # turn k answers a conversation with k assistant messages
      - run: head /app/counts.csv              # a turn may be one alternative …
      - choices:                               # … or several with weights
          - weight: 3
            say: I fit the curve.
            run: |
              python3 fit.py
          - weight: 1
            write: {path: /app/answer.json, content: "{}"}
          - weight: 1
            fail: {status: 503, retry_after: 0.1, times: 2}
      - when: "No such file"                   # instead of by number: the last user or tool
        run: ls -la                            # message matches this regular expression
    otherwise: {say: Done.}     # past the last turn, and where no tool is offered; default: Done.

An alternative holds any of

    weight       a number, 1 when left out
    label        a name kept in the record
    say          text of the reply
    think        reasoning text (``reasoning_content``)
    run          a shell command, or a list: one tool call each, to the shell-like tool offered
    write        {path, content}, or a list: to the write-like tool offered, else through the shell
    call         {name, arguments}, or a list: to exactly this tool
    fail         {status, message, retry_after, times} or {disconnect: true, times}: the first
                 ``times`` attempts (default 1) fail, a later one gets another alternative
    finish       finish_reason to claim: stop, length or content_filter
    delay_ms     wait before the reply
    usage        overrides of the reported usage, such as {prompt_tokens: 100000}

Which alternative: drawn from the rollout's seed (job seed, task, trial), the number of assistant
messages and what they said. Members of a group differ, a re-run does not; tool output, which may
hold times and process ids, takes no part. The first completion token carries the log of the
chosen alternative's probability among those that do not fail, every other token 0. A temperature
T reshapes the weights to w ** (1 / T); T = 0, which agents send by habit, is ignored.
"""
