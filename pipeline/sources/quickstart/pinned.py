"""What the versions in constraints.txt give, to the last byte; asserted by tests/sources/test_quickstart_corpus.py."""

PINNED_SHA256 = {
    "quickstart_chat-train.jsonl": "a1ff0434a92a501e55ae5627ecb28759d181eb21ba65fa99b6cdabfe1e16ecd4",
    "quickstart_chat-validation.jsonl": "7808da50e7b4390a3dd45714edeb0660e022dc5f919bae6edddc0e7a9c7dfbc5",
    "quickstart_text-train.jsonl": "2f501b9a96bf576986c7bfb9872e54a40a36502ccdade5ed6e901b74edc671dc",
    "quickstart_text-validation.jsonl": "23874963082870c6c68ea6c06267f91e5260a369053a57be27736a12d430fc4f",
    "spelling-train.jsonl": "165d70627b27dbd27aa1c5ee7c5328ccd4a438a8b83ce3556fb69ba5584dac47",
    "spelling-validation.jsonl": "e28abb8a975d6a0d97e2bac45d19fdaa50f807608472a9cd7816c1b1352f22d6",
}
