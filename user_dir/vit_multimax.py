"""DeiT with MultiMax in every attention and in its output layer, as models of timm.

    import timm, vit_multimax
    model = timm.create_model("deit_small_multimax", num_classes=1000)

Sizes: deit_tiny_multimax, deit_small_multimax, deit_base_multimax. The arguments of `deit`, such as
head="cls" or normalizer="evsoftmax", and those of timm's VisionTransformer are keyword arguments of
`create_model`. pretrained=True needs head="cls", as DeiT's weights have a class token; the
modulators start near the identity, so the model starts close to DeiT. scripts/imagenet.sh trains
these models with DeiT's recipe. This file does not import fairseq.
"""

from collections import OrderedDict

from torch import nn

from multimax_fairseq import Modulator, replace_softmax

try:
    import timm
except ModuleNotFoundError as error:
    if error.name != "timm":
        raise
    raise SystemExit("timm is missing: docs/python.md says how to install it") from None

# GAP: average the patches after the last norm. CLS: classify the class token.
HEADS = {
    "gap": {"global_pool": "avg", "class_token": False, "fc_norm": False},
    "cls": {"global_pool": "token", "class_token": True},
}


def deit(
    size,
    head="gap",
    normalizer="multimax",
    output="multimax",
    order=2,
    terms="both",
    settings=None,
    **timm_options,
):
    """Return a DeiT for images of 224 x 224 pixels; logits are (B, classes).

    head: "gap" or "cls", the rows of the paper's Table 1.
    normalizer: mapping of every attention layer, a key of `multimax_fairseq.NORMALIZERS`.
    output: "multimax" modulates the logits; "softmax" does not.
    order, terms: of the modulators, as `Modulator`; Table 5 compares them.
    settings: other arguments of `Normalizer`, such as {"temperature": 0.5} for softmax.
    """
    options = {**HEADS[head], **timm_options}
    model = timm.create_model(f"deit_{size}_patch16_224", **options)
    # Images have no mask, so the modulators are those of Eq. 6, which need not be monotone.
    shape = {"order": order, "terms": terms, "monotone": False}
    settings = {**(shape if normalizer == "multimax" else {}), **(settings or {})}
    if normalizer != "softmax" or settings:
        replace_softmax(model, normalizer, **settings)
    if output == "multimax":
        # Cross-entropy and softmax of modulated logits are those of MultiMax.
        model.head = nn.Sequential(OrderedDict(linear=model.head, modulator=Modulator(**shape)))
    return model


@timm.models.register_model
def deit_tiny_multimax(pretrained=False, **options):
    return deit("tiny", pretrained=pretrained, **options)


@timm.models.register_model
def deit_small_multimax(pretrained=False, **options):
    return deit("small", pretrained=pretrained, **options)


@timm.models.register_model
def deit_base_multimax(pretrained=False, **options):
    return deit("base", pretrained=pretrained, **options)
