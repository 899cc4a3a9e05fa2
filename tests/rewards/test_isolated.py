"""Verification in a fresh sandbox: what crosses over, and what does not."""

from __future__ import annotations


async def test_the_workspace_crosses_over_as_the_agent_left_it(lab, make_task):
    task = make_task(
        """\
        #!/bin/sh
        cd /app
        [ ! -e removed.txt ] && [ "$(cat changed.txt)" = new ] && [ "$(cat 'made here/by agent')" = made ] &&
            [ "$(cat inner)" = new ] && [ -x tool.sh ] && [ ! -e outer ] && [ ! -e pipe ] &&
            [ "$(readlink python)" = /usr/bin/python3 ] && [ "$(stat -c %U changed.txt)" = root ] &&
            [ ! -e /home/agent/note ] && [ ! -e /tmp/note ] && echo 1 > /logs/verifier/reward.txt
        """,
        **{
            "environment/Dockerfile": "FROM debian:12-slim\nWORKDIR /app\nCOPY app /app\n",
            "environment/app/removed.txt": "x\n",
            "environment/app/changed.txt": "old\n",
        },
    )
    agent = """\
        rm removed.txt; echo new > changed.txt; mkdir 'made here'; echo made > 'made here/by agent'
        ln -s /app/changed.txt inner; ln -s /etc/hostname outer; ln -s /usr/bin/python3 python
        mkfifo pipe; touch tool.sh ~/note /tmp/note; chmod +x tool.sh
        """
    scored = await lab.run(task, agent=agent, mode="isolated")
    assert scored.reward == 1, scored.result
    assert scored.result.notes == ("link dropped: /app/outer -> /etc/hostname",)


async def test_declared_artifacts_cross_over(lab, make_task):
    task = make_task(
        """\
        #!/bin/sh
        [ "$(cat /srv/out/result.json)" = "{}" ] && echo 1 > /logs/verifier/reward.txt
        """,
        frontmatter="artifacts: [/srv/out/result.json, /srv/out/missing.json]\n",
    )
    root = "mkdir -p /srv/out; echo '{}' > /srv/out/result.json"
    assert (await lab.run(task, root=root, mode="isolated")).reward == 1


async def test_the_agents_service_does_not_cross_over(lab, make_task):
    task = make_task(
        "#!/bin/sh\nkill -0 $(cat /app/pid) && exit 1\necho 1 > /logs/verifier/reward.txt\n",
        frontmatter="verifier: {hardening: {kill_processes: false}}\n",
    )
    agent = "setsid sleep 600 > /dev/null 2>&1 < /dev/null & echo $! > pid"
    assert (await lab.run(task, agent=agent, mode="isolated")).reward == 1
