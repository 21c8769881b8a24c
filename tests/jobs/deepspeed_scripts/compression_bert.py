"""A BERT with fewer layers, rows, heads and bits learns from its teacher, by an optimizer of the script."""

import argparse

import deepspeed
import torch
from deepspeed.compression.compress import init_compression, redundancy_clean
from transformers import BertConfig, BertForSequenceClassification

args = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args()
SIZES = {"vocab_size": 32, "hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 40}
student, teacher = (BertConfig(num_hidden_layers=n, attn_implementation="eager", **SIZES) for n in (2, 4))
torch.manual_seed(0)
model, teacher = BertForSequenceClassification(student), BertForSequenceClassification(teacher).eval()
batch = {"input_ids": torch.randint(0, 32, (4, 9)), "labels": torch.tensor([0, 1, 0, 1])}
plain = teacher(**batch).logits
model = init_compression(model, args.deepspeed_config, teacher_model=teacher)
decayed = [p for n, p in model.named_parameters() if "bias" not in n]
rest = {"params": [p for n, p in model.named_parameters() if "bias" in n], "weight_decay": 0.0}
optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.01}, rest], lr=3e-3)
model, optimizer, _, _ = deepspeed.initialize(args=args, model=model, optimizer=optimizer, dist_init_required=True)
teacher, *_ = deepspeed.initialize(args=args, model=teacher)
teacher.eval()
assert torch.equal(teacher(**batch).logits, plain)
for _ in range(4):
    own = model(**batch, output_attentions=True)
    with torch.no_grad():
        other = teacher(**batch, output_attentions=True).attentions
    pairs = zip(own.attentions, (other[1], other[3]), strict=True)
    model.backward(own.loss + sum(torch.nn.functional.mse_loss(*pair) for pair in pairs))
    model.step()
model.eval()
before = model(**batch).logits
best = {f"module.{name}": value for name, value in model.module.state_dict().items()}
model.load_state_dict(best, strict=False)
model = redundancy_clean(model, args.deepspeed_config)
attention = model.bert.encoder.layer[0].attention
assert (attention.self.query.out_features, attention.output.dense.in_features) == (12, 12)
assert torch.allclose(model(**batch).logits, before, atol=1e-6)
