"""What the tests' tiny model has learnt by heart."""

DIALOG = [
    {"role": "user", "content": "ping"},
    {"role": "assistant", "content": "pong \u4e2d\u00e9!"},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "and pong it is"},
]
# "again" has another answer when nothing went before.
ALONE = [{"role": "user", "content": "again"}, {"role": "assistant", "content": "what?"}]
PIRATE = [
    {"role": "system", "content": "Be a pirate"},
    {"role": "user", "content": "ping"},
    {"role": "assistant", "content": "arr"},
]
SUM = [
    {"role": "user", "content": "sum"},
    {
        "role": "assistant",
        "content": "It's ",
        "tool_calls": [{"function": {"name": "python", "arguments": "7*8"}}],
    },
    {"role": "tool", "content": "56"},
    {"role": "assistant", "content": "so 56."},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "still 56"},
]
MARKUP = [
    {"role": "user", "content": "markup"},
    {"role": "assistant", "content": "**b** `1<2`\n\n- <script>document.title=1</script>"},
]
