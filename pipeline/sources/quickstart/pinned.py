"""What the versions in constraints.txt give, to the last byte; asserted by tests/sources/test_quickstart_corpus.py."""

PINNED_SHA256 = {
    "quickstart_chat-train.jsonl": "23ae0f84ab1bd20830b38c538d5aa9a1215f4348c5f9ccbe7ede285368a433d5",
    "quickstart_chat-validation.jsonl": "a7b126cad82cfc9710c7d2c71b3e4020dc4c12a874416b099fbe167f4ba88da6",
    "quickstart_text-train.jsonl": "2f501b9a96bf576986c7bfb9872e54a40a36502ccdade5ed6e901b74edc671dc",
    "quickstart_text-validation.jsonl": "23874963082870c6c68ea6c06267f91e5260a369053a57be27736a12d430fc4f",
    "spelling-train.jsonl": "165d70627b27dbd27aa1c5ee7c5328ccd4a438a8b83ce3556fb69ba5584dac47",
    "spelling-validation.jsonl": "e28abb8a975d6a0d97e2bac45d19fdaa50f807608472a9cd7816c1b1352f22d6",
}
