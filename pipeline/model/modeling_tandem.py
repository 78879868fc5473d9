"""The Tandem model: GPT-2 with TandemConfig's options. Shapes: B batch, T token, D width, V vocabulary."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel, slice_logits_to_keep
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_tandem import SMEAR_CHANNELS, TandemConfig
from .initialization_tandem import init_module, with_role
from .layers_tandem import TandemAttention, TandemBlock, make_norm, rotary_angles, rotary_table
from .loss_tandem import IGNORED, summed_cross_entropy, token_nll
from .masks_tandem import attention_masks, flash_documents, positions


@dataclass
class TandemOutput(CausalLMOutputWithPast):
    """nats: while training, of each target (B, T) float32, without gradients, 0 where the label is -100."""

    nats: torch.Tensor | None = None


class TandemPreTrainedModel(PreTrainedModel):
    config_class = TandemConfig
    config: TandemConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TandemBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": TandemBlock,
        "attentions": OutputRecorder(TandemAttention, index=1, layer_name=".attn"),
    }

    @torch.no_grad()
    def _init_weights(self, module):
        init_module(module, self.config)

    def resize_token_embeddings(self, new_num_tokens=None, pad_to_multiple_of=None, mean_resizing=True):
        """As transformers has it, with the value embeddings; the rows that vocab_multiple adds stay outside the vocabulary."""
        if new_num_tokens is None and pad_to_multiple_of is None:
            return self.get_input_embeddings()
        config, multiple = self.config, pad_to_multiple_of or 1
        vocab_size = -(-(new_num_tokens or config.vocab_size) // multiple) * multiple
        # First without the rows outside: a new id must not get one of them, which nothing has ever trained.
        self._resize_rows(config.vocab_size, mean_resizing)
        config.vocab_size = vocab_size
        self._resize_rows(config.padded_vocab_size, mean_resizing)
        config.vocab_size = self.vocab_size = vocab_size
        return self.get_input_embeddings()

    def _resize_rows(self, rows: int, mean_resizing: bool) -> None:
        super().resize_token_embeddings(rows, mean_resizing=mean_resizing)
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding) and name.endswith("value_embedding"):
                self._get_resized_embeddings(module, rows, mean_resizing=mean_resizing)


class TandemModel(TandemPreTrainedModel):
    """The decoder without its head; last_hidden_state is normalized."""

    def __init__(self, config: TandemConfig):
        super().__init__(config)
        if config._attn_implementation == "vllm" and (reasons := config.why_not_in_vllm):
            raise ValueError(f"vLLM cannot run this model: {'; '.join(reasons)}")
        self.wte = with_role(nn.Embedding(config.padded_vocab_size, config.n_embd), "embedding")
        if config.position_embedding == "learned":
            self.wpe = with_role(nn.Embedding(config.n_positions, config.n_embd), "position")
        if config.embedding_norm:
            self.ln_embedding = make_norm(config, config.n_embd)
        if config.smear:
            self.smear_gate = with_role(nn.Linear(SMEAR_CHANNELS, 1, bias=False), "gate")
            self.smear_lambda = nn.Parameter(torch.empty(1))
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList([TandemBlock(config, layer_idx) for layer_idx in range(config.n_layer)])
        if config.residual_lambdas:
            self.resid_lambdas = nn.Parameter(torch.empty(config.n_layer))
            self.x0_lambdas = nn.Parameter(torch.empty(config.n_layer))
        if config.backout:
            self.backout_lambda = nn.Parameter(torch.empty(1))
        self.ln_f = make_norm(config, config.n_embd)
        self.gradient_checkpointing = False
        self.stream_dtype = None  # that the residual stream begins in, where the embedding is stored in another one
        self.post_init()

    def get_input_embeddings(self):
        return self.wte

    def set_input_embeddings(self, value):
        self.wte = value

    @capture_outputs
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        config = self.config
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("forward takes exactly one of input_ids and inputs_embeds")
        if input_ids is None and config.value_embeddings:
            raise ValueError("a model with value_embeddings needs input_ids: each layer embeds the tokens itself")
        if use_cache is None:
            # Rows of packed documents get none by default: with a cache they would be one text.
            packed = position_ids is not None and attention_mask is None
            use_cache = config.use_cache and not self.training and (past_key_values is not None or not packed)
        if self.gradient_checkpointing and self.training:
            use_cache, past_key_values = False, None
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=config)

        x_BTD = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        if self.stream_dtype is not None:
            x_BTD = x_BTD.to(self.stream_dtype)
        masks = attention_masks(config, x_BTD, attention_mask, position_ids, past_key_values)
        packed = position_ids is not None and attention_mask is None and past_key_values is None
        if packed:
            kwargs |= flash_documents(config, x_BTD, position_ids)
        # Positions decide where smear may look back; without them only a row's first token has nothing before it.
        restarts = position_ids is not None or attention_mask is not None or past_key_values is not None
        if position_ids is None:
            past_length = 0 if past_key_values is None else past_key_values.get_seq_length()
            if config.position_embedding == "learned" and x_BTD.shape[1] > config.n_positions:
                raise ValueError(
                    f"a row of {x_BTD.shape[1]} tokens: the model has {config.n_positions} learned positions"
                )
            position_ids = positions(attention_mask, past_length, x_BTD.shape[1], x_BTD.device)

        if config.position_embedding == "learned":
            x_BTD = x_BTD + self.wpe(position_ids)
        if config.normalization == "rms_norm" and torch.is_autocast_enabled(x_BTD.device.type):
            x_BTD = x_BTD.to(torch.get_autocast_dtype(x_BTD.device.type))  # the whole residual stream, as in nanochat
        if config.embedding_norm:
            x_BTD = self.ln_embedding(x_BTD)
        if config.smear:
            x_BTD = self._smear(x_BTD, position_ids if restarts else None, past_key_values)
        x_BTD = self.drop(x_BTD)

        rotary = None
        if config.position_embedding == "rope" and not restarts and x_BTD.shape[1] <= config.n_positions:
            rotary = tuple(table[:, :, : x_BTD.shape[1]] for table in rotary_table(config, x_BTD.device))
        elif config.position_embedding == "rope":
            rotary = rotary_angles(config, position_ids)
        embedding_BTD = x_BTD if config.residual_lambdas else None
        middle_BTD = None
        for i, block in enumerate(self.h):
            lambdas = (self.resid_lambdas[i], self.x0_lambdas[i]) if config.residual_lambdas else None
            mask = masks["full_attention" if config.windows[i] is None else "sliding_attention"]
            x_BTD = block(
                x_BTD, embedding_BTD, lambdas, input_ids, rotary, mask, past_key_values=past_key_values, **kwargs
            )
            if config.backout and i == config.n_layer // 2:
                middle_BTD = x_BTD
        if middle_BTD is not None:
            x_BTD = x_BTD - self.backout_lambda.to(x_BTD.dtype) * middle_BTD
        return BaseModelOutputWithPast(
            last_hidden_state=self.ln_f(x_BTD), past_key_values=past_key_values if use_cache else None
        )

    def _smear(self, x_BTD, position_ids, past_key_values):
        """Adds a gated share of the embedding before; a document's first token (position 0) has none."""
        before_BTD = F.pad(x_BTD[:, :-1], (0, 0, 1, 0))
        if past_key_values is not None:
            if not past_key_values.layers:  # a bare DynamicCache(): give it the layers of this config
                past_key_values.layers = DynamicCache(config=self.config).layers
                past_key_values.layer_class_to_replicate = None
            continued = past_key_values.has_previous_state(0)
            seen_BDT = past_key_values.update_conv_state(x_BTD.transpose(1, 2), 0, conv_kernel_size=1)
            if continued:
                before_BTD = seen_BDT[..., -x_BTD.shape[1] - 1 : -1].transpose(1, 2)
        gate_BT1 = self.smear_lambda.to(x_BTD.dtype) * torch.sigmoid(self.smear_gate(x_BTD[..., :SMEAR_CHANNELS]))
        if position_ids is not None:
            gate_BT1 = gate_BT1 * (position_ids > 0)[..., None]
        return x_BTD + gate_BT1.to(x_BTD.dtype) * before_BTD


class TandemForCausalLM(TandemPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}  # noqa: RUF012

    def __init__(self, config: TandemConfig):
        super().__init__(config)
        self.transformer = TandemModel(config)
        self.lm_head = with_role(nn.Linear(config.n_embd, config.padded_vocab_size, bias=False), "head")
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        shift_labels=None,
        use_cache=None,
        num_items_in_batch=None,
        logits_to_keep: int | torch.Tensor = 0,
        per_token_loss: bool = False,
        **kwargs,
    ) -> TandemOutput:
        """Logits (B, T, V), and the loss when labels are given; while training the loss and its nats alone (logits None).

        labels (B, T): as input_ids, shifted here. shift_labels (B, T): already shifted, taken as they are. -100 is
        ignored. loss: sum of nats / num_items_in_batch, or the mean over the targets without it; with per_token_loss
        (B, T) nats without gradients. position_ids that restart at 0 isolate packed documents.
        """
        if labels is not None and shift_labels is None:
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        if use_cache is None and shift_labels is not None:
            use_cache = False
        outputs = self.transformer(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_BTD = outputs.last_hidden_state
        loss = logits = nats_BT = None
        if shift_labels is not None:
            loss, nats_BT = self._loss(hidden_BTD, shift_labels, num_items_in_batch, per_token_loss)
        if loss is None or not (self.training or per_token_loss):
            logits = self._logits(slice_logits_to_keep(hidden_BTD, logits_to_keep))
        return TandemOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            nats=nats_BT if self.training else None,
        )

    def _logits(self, hidden_BTD):
        logits = self.lm_head(hidden_BTD)[..., : self.config.vocab_size]
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = cap * torch.tanh(logits.float() / cap)
        return logits

    def _loss(self, hidden_BTD, shift_labels, num_items_in_batch, per_token_loss: bool):
        hidden_ND, labels_N = hidden_BTD.flatten(0, 1), shift_labels.flatten().to(hidden_BTD.device)
        if isinstance(self.lm_head, nn.Linear):
            weight_VD, softcap = self.lm_head.weight[: self.config.vocab_size], self.config.final_logit_softcapping
            if per_token_loss:
                return token_nll(hidden_ND, weight_VD, labels_N, softcap=softcap).view(shift_labels.shape), None
            total, nats_N = summed_cross_entropy(hidden_ND, weight_VD, labels_N, softcap=softcap)
        else:  # PEFT has wrapped the head: its weight is the old one, and a product with that leaves the adapter out
            nats_N = F.cross_entropy(self._logits(hidden_ND).float(), labels_N, reduction="none")
            if per_token_loss:
                return nats_N.view(shift_labels.shape), None
            total, nats_N = nats_N.sum(), nats_N.detach()
        if num_items_in_batch is None:
            num_items_in_batch = (labels_N != IGNORED).sum().clamp(min=1)
        elif torch.is_tensor(num_items_in_batch):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch, nats_N.view(shift_labels.shape)

    @torch.no_grad()
    def per_token_nll(self, input_ids, shift_labels, position_ids=None):
        """Nats of each label, (B, T) float32, 0 where the label is -100."""
        return self(input_ids, position_ids=position_ids, shift_labels=shift_labels, per_token_loss=True).loss

    @staticmethod
    def create_masks_for_generate(
        config, inputs_embeds, attention_mask, past_key_values, position_ids=None, **kwargs
    ) -> dict:
        """Masks of a static cache; transformers' own gives a smearing first layer a mask without its window."""
        return attention_masks(config, inputs_embeds, attention_mask, position_ids, past_key_values)
