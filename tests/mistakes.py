"""Wrong flags and wrong pairs of flags, and the process in which fairseq-train is given them.

What is wrong goes through the command's own parser, models and criteria, all of it in one process;
to compose settings as the command does takes a second each, so few are.
"""

import contextlib
import functools
import io
import json
import re
import sys
import types

from examples import SETTINGS as GIVEN

LM, MT, RNN = "transformer_lm_multimax", "transformer_multimax", "rnn_multimax"
NO_NUMBER = ("x", "", "0.5.1", "1,2", "0x10")
NO_WHOLE = (*NO_NUMBER, "nan", "inf", "1.5", "-1", "0", "99999999999999999999")
NEVER = (*NO_NUMBER, "nan", "inf", "-inf", "1e400")
NO_SHARE = (*NEVER, "-0.1", "1", "1.5", "2")
NO_WORD = ("x", "", "Softmax", "softmax,multimax", "multimax ", "nan", "0")
NO_SWITCH = ("x", "0", "")
ENTMAX = ("--attention-normalizer", "alpha_entmax")
DENSITY = ("--cross-attention", "continuous_softmax")
SMOOTHED = ("--criterion", "label_smoothed_multimax_cross_entropy", "--label-smoothing", "0.1")
OURS = ("--criterion", "multimax_cross_entropy")

# Flag, values that it cannot have, and beside which flags it acts.
FLAGS = [
    ("--attention-normalizer", NO_WORD, ()),
    ("--output-normalizer", (*NO_WORD, "topk", "evsoftmax", "sigmoid"), ()),
    ("--attention-gate", NO_SWITCH, ()),
    ("--scalar-gradient-scale", (*NEVER, "0", "-1"), ()),
    ("--monitor-interval", NO_WHOLE, ()),
    ("--softmax-temperature", (*NEVER, "0", "-1"), ("--attention-normalizer", "softmax")),
    ("--learn-temperature", NO_SWITCH, ("--attention-normalizer", "softmax")),
    ("--multimax-order", (*NO_WHOLE, "3"), ()),
    ("--multimax-terms", (*NO_WORD, "high,low"), ()),
    ("--multimax-init-std", (*NEVER, "-0.1"), ()),
    ("--multimax-monotone", NO_SWITCH, ()),
    ("--multimax-sink", NO_WORD, ()),
    ("--multimax-heads", NO_WORD, ()),
    ("--topk", NO_WHOLE, ("--attention-normalizer", "topk")),
    ("--entmax-alpha", (*NEVER, "0.9", "-1"), ENTMAX),
    ("--entmax-heads", NO_WORD, ENTMAX),
    ("--output-entmax-alpha", (*NEVER, "1", "0.9"), ("--output-normalizer", "alpha_entmax")),
    ("--ssmax-start", NEVER, ("--attention-normalizer", "ssmax")),
    ("--sigmoid-bias", NEVER, ("--attention-normalizer", "sigmoid")),
    ("--cross-attention", (*NO_WORD, "continuous"), ()),
    ("--encoder-self-attention", (*NO_WORD, "continuous"), ()),
    ("--continuous-context", NO_WORD, DENSITY),
    ("--continuous-bases", (*NO_WHOLE, "31"), DENSITY),
    ("--continuous-widths", ("x", "", ",", "0.1,", "nan", "0.1;0.2", "0", "-1", "inf"), DENSITY),
    ("--continuous-ridge", (*NEVER, "0", "-1"), DENSITY),
    ("--rdrop-alpha", (*NEVER, "-1"), OURS),
    ("--scalar-lr-scale", (*NEVER, "-1"), ("--optimizer", "multimax_adam")),
    ("--scalar-freeze-updates", ("x", "", "1.5", "nan", "-1"), ("--optimizer", "multimax_adam")),
]
PLACES = ("", " ", ",", "x", "Encoder", "encoder decoder", "cross=", "=topk", "cross=x", "all")
PLACES += ("cross=sparsemax,cross=entmax15", "encoder,decoder,encoder")
RECURRENT = [
    ("--cell-type", (*NO_WORD, "rnn"), ()),
    *((f"--{side}-{of}", NO_WHOLE, ()) for side, of in (
        ("encoder", "embed-dim"), ("encoder", "hidden-size"), ("encoder", "layers"),
        ("decoder", "embed-dim"), ("decoder", "hidden-size"))),
    ("--dropout", NO_SHARE, ()),
    ("--hidden-dropout", NO_SHARE, ()),
    ("--share-decoder-input-output-embed", NO_SWITCH, ()),
    ("--share-all-embeddings", NO_SWITCH, ()),
]  # fmt: skip
# hydra composes the language model's settings, which it reads in a grammar of its own.
COMPOSED = [
    *(("--attention-normalizer-at", value) for value in ("", "a'b", "{x", "cross")),
    *(("--multimax-init-std", value) for value in ("nan", "inf")),
    ("--monitor-interval", "0"),
]
# What hydra cannot read, of which only a part comes back.
UNREAD = [("x\\", "attention_normalizer_at='x"), ("${x}", "attention_normalizer_at")]
# Flags that do not go together, what each gives alone being right; what the sentence names.
PAIRS = [
    (MT, "--cross-attention continuous_softmax --no-cross-attention", "--cross-attention"),
    (MT, f"{' '.join(DENSITY)} --continuous-bases 10", "--continuous-bases 10"),
    (MT, f"{' '.join(DENSITY)} --continuous-widths 0.1,0.2,0.3,0.4", "--continuous-widths"),
    (MT, "--attention-normalizer topk", "--topk"),
    (MT, "--update-freq 0", "--update-freq 0 must"),
    (MT, "--lr-scheduler inverse_sqrt --warmup-updates 0", "--warmup-updates 0 must"),
    (MT, "--lr-scheduler polynomial_decay", "--total-num-update above 0"),
    (LM, "--lr-scheduler polynomial_decay --total-num-update 0", "--total-num-update above 0"),
    (MT, "--best-checkpoint-metric bleu", "--best-checkpoint-metric bleu needs --eval-bleu"),
    (MT, "--best-checkpoint-metric bleu --eval-bleu", "add --maximize-best-checkpoint-metric"),
    (MT, f"{' '.join(SMOOTHED)} --best-checkpoint-metric accuracy", "needs --report-accuracy"),
    (MT, f"{' '.join(SMOOTHED)} --best-checkpoint-metric accuracy --report-accuracy", "worst"),
    (MT, "--maximize-best-checkpoint-metric", "leave --maximize-best-checkpoint-metric out"),
    *((MT, f"--best-checkpoint-metric {name} --maximize-best-checkpoint-metric", "a low " + name)
      for name in ("nll_loss", "ppl")),
    (MT, "--eval-bleu --eval-bleu-args [5]", "--eval-bleu-args [5] is no JSON dictionary"),
    (MT, '--eval-bleu --eval-bleu-args {"baem":5}', "'baem', which no search reads: did you mean"),
    (MT, "--eval-bleu --eval-bleu-detok mose", "--eval-bleu-detok mose: did you mean 'moses'"),
    *((MT, f"--optimizer adam --adam-betas {text}", f"--adam-betas {text} must be two numbers")
      for text in ("0.9", "(0.9,)", "foo", "[0.9,0.98,0.99]", "(0.9,98)", "(1.0,0.98)", "('x',0)",
                   "{{}}")),
    *((MT, f"--optimizer-overrides {text}", f"--optimizer-overrides {text} is no dictionary")
      for text in ("{lr:1}", "1", "{{'lr':1}}")),
    *((MT, f"--{name} {value}", f"--{name} {value} must be a whole number of at least 0, below")
      for name in ("seed", "num-workers") for value in (-1, 2**31)),
    (MT, "--base-layers 1", "--base-layers 1 shares layers among processes"),
    *((MT, f"--{name} {value}", f"--{name} {float(value)} must be a number of at least 0")
      for name in ("dropout", "attention-dropout", "activation-dropout")
      for value in ("1.5", "-0.1", "nan")),
    (LM, "--attention-dropout=1.0", "--attention-dropout 1.0 must"),
    (MT, "--encoder-layers -1", "--encoder-layers -1 must be a whole number of at least 0"),
    *((MT, f"--adaptive-softmax-cutoff {cutoff}", f"--adaptive-softmax-cutoff {cutoff} must be")
      for cutoff in ("10,99", "20,10", "10,10", "0,10")),
    (LM, "--adaptive-softmax-cutoff foo --output-normalizer softmax", "cutoff foo must be"),
    (LM, "--output-normalizer softmax --adaptive-input --adaptive-input-cutoff 9,99", "9,99 must"),
    (MT, "--attention-normalizer-at cross=topk", "--topk"),
    (MT, "--attention-normalizer-at encoder --no-cross-attention --topk 3", "--topk 3"),
    (MT, "--no-cross-attention --attention-normalizer-at cross", "--attention-normalizer-at"),
    (MT, "--attention-normalizer softmax --attention-normalizer-at=", "'' names no attention"),
    (MT, "--encoder-attention-heads 3", "--encoder-attention-heads 3"),
    (MT, "--decoder-attention-heads 0", "--decoder-attention-heads 0"),
    (MT, "--share-all-embeddings --encoder-embed-dim 32", "--encoder-embed-dim 32"),
    (MT, "--continuous-context continuous", "--continuous-context continuous"),
    (MT, "--output-normalizer multimax --adaptive-softmax-cutoff 10,20", "--adaptive-softmax-cut"),
    (MT, "--output-normalizer sparsemax", "--output-normalizer sparsemax"),
    (MT, "--output-normalizer sparsemax --criterion cross_entropy", "sparsemax"),
    (MT, f"--output-normalizer entmax15 {' '.join(OURS)}", "--output-normalizer entmax15"),
    (MT, f"--output-normalizer alpha_entmax {' '.join(SMOOTHED)}", "alpha_entmax"),
    (MT, "--criterion entmax_loss", "--criterion entmax_loss"),
    (MT, "--criterion entmax_loss --output-normalizer multimax", "--criterion entmax_loss"),
    (MT, "--criterion entmax_loss --rdrop-alpha 1", "--rdrop-alpha 1"),
    (MT, "--criterion cross_entropy --rdrop-alpha 1", "--rdrop-alpha 1"),
    (MT, "--criterion entmax_loss --label-smoothing 0.1", "--label-smoothing 0.1"),
    (MT, "--adaptive-softmax-cutoff 10,20 --criterion cross_entropy", "cutoff 10,20"),
    (MT, f"--adaptive-softmax-cutoff 10,20 {' '.join(OURS)}", "cutoff 10,20"),
    (MT, "--criterion adaptive_loss --ddp-backend legacy_ddp", "adaptive_loss"),
    (MT, "--criterion adaptive_loss", "--ddp-backend=legacy_ddp"),
    (MT, "--cell-type lstm", "--cell-type lstm"),
    (MT, "--tpu", "--tpu"), (MT, "--save-async", "needs the package iopath"),
    (MT, "--num-shards 2", "--num-shards 2"),
    (MT, "--shard-id 1", "--shard-id 1"),
    *((MT, f"{' '.join(SMOOTHED[:2])} --label-smoothing {value}", f"--label-smoothing {value}")
      for value in ("-0.1", "1.0", "2.0", "nan", "inf")),
    *((MT, f"--criterion label_smoothed_cross_entropy --label-smoothing {value}", value)
      for value in ("-0.1", "1.0", "2.0")),
    (RNN, "--encoder-self-attention continuous_softmax", "--encoder-self-attention"),
    (RNN, "--attention-normalizer-at decoder", "--attention-normalizer-at"),
    (RNN, "--share-decoder-input-output-embed --decoder-embed-dim 8", "--decoder-embed-dim 8"),
    (RNN, "--share-all-embeddings --encoder-embed-dim 8", "--encoder-embed-dim 8"),
    (RNN, "--encoder-attention-heads 2", "--encoder-attention-heads 2"),
    (LM, "--cross-attention continuous_softmax", "--cross-attention continuous_softmax"),
    (LM, "--continuous-bases 3", "--continuous-bases 3"),
    (LM, "--tie-adaptive-weights", "--tie-adaptive-weights"),
    (LM, "--adaptive-input --output-normalizer softmax", "--adaptive-input"),
]  # fmt: skip
# Of other commands.
COMMANDS = [
    *(("fairseq-generate", words, words) for words in (
        "--beam 0", "--beam -1", "--nbest 0", "--num-shards 2", "--shard-id 1", "--tpu",
        "--model-overrides x", "--model-overrides []", "--model-overrides {1:2}",
        "--model-overrides dict(dropout=0)")),
    ("fairseq-generate", "--beam 2 --nbest 3", "--nbest 3 is more than --beam 2"),
    ("fairseq-generate", "--print-step", "--print-step"),
    ("fairseq-generate", "--retain-iter-history", "--retain-iter-history"),
    ("fairseq-generate", "--constraints", "--constraints ordered"),
    ("fairseq-generate", "--temperature 0", "--temperature 0.0 must"),
    ("fairseq-generate", "--temperature nan", "--temperature nan must"),
    ("fairseq-generate", "--sampling-topk 3", "--sampling-topk requires --sampling"),
    ("fairseq-generate", "--sampling --sampling-topk 3 --sampling-topp 0.9", "give one of them"),
    ("fairseq-generate", "--sampling --sampling-topp 1.5", "--sampling-topp 1.5 must be"),
    ("fairseq-generate", "--sampling --sampling-topk 99999", "--sampling-topk 99999 is more than"),
    *(("fairseq-generate", f"--dataset-impl raw {words}", "--replace-unk stops fairseq at")
      for words in ("--replace-unk", "--replace-unk words.txt")),
    ("fairseq-interactive", "--print-alignment soft", "--print-alignment soft is for"),
    ("fairseq-interactive", "--results-path out", "--results-path acts only in fairseq-generate"),
    ("fairseq-interactive", "--truncate-source", "--truncate-source acts only in fairseq-train"),
    *((name, "--bf16", "--bf16 acts only in fairseq-train")
      for name in ("fairseq-generate", "fairseq-interactive", "fairseq-validate")),
    ("fairseq-eval-lm", "--tokens-per-sample 32 --bf16", "--bf16 acts only in fairseq-train"),
    *(("fairseq-interactive", words, f"{words.split()[0]} needs references")
      for words in ("--score-reference", "--prefix-size 2")),
    *(("fairseq-generate", f"--max-len-a={share}", f"--max-len-a {share} must be a finite number")
      for share in ("nan", "inf", "-0.5")),
    *(("fairseq-eval-lm", f"--tokens-per-sample 32 --context-window 8 {words}", f"{words} with")
      for words in ("--num-workers 2", "--num-shards 2")),
    ("fairseq-generate", "--min-len 5 --max-len-b 3", "--max-len-b 3 is less than --min-len 5"),
    ("fairseq-generate", "--lm-weight 0.3", "--lm-weight 0.3 needs --lm-path"),
    ("fairseq-generate", "--lm-path x.pt", "--lm-path x.pt does nothing at --lm-weight 0"),
    ("fairseq-interactive", "--lm-path x.pt --lm-weight 0.1", "--lm-path x.pt is read by"),
    ("fairseq-generate", "--sampling --match-source-len", "--match-source-len"),
    ("fairseq-interactive", "--beam 0", "--beam 0"),
    ("fairseq-interactive", "--num-shards 2", "--num-shards 2"),
    ("fairseq-interactive", "--print-step", "--print-step"),
    ("fairseq-validate", "--num-shards 2", "--num-shards 2"),
    ("fairseq-validate", "--model-overrides x", "--model-overrides x"),
    *(("fairseq-eval-lm", f"--tokens-per-sample 32 {words}", words) for words in (
        "--context-window 32", "--context-window 40", "--context-window -1", "--shard-id 1",
        "--num-shards 0", "--shard-id -1", "--model-overrides x", "--tpu")),
]  # fmt: skip
# A good value of each mapping's option, which no other mapping takes.
GOOD = {setting: value for setting, (_, value) in GIVEN.items()}
GOOD |= {"multimax_heads": "separate", "entmax_heads": "shared", "output_entmax_alpha": 1.3}


def cases():
    """[(architecture, flags, what the sentence names)]: those of one flag, then pairs."""
    flags = [("--attention-normalizer-at", PLACES, ()), *FLAGS]
    for arch, table in ((MT, flags), (RNN, RECURRENT)):
        for flag, values, beside in table:
            for value in values:
                # argparse takes no -1 and no empty text for a value unless it is written so.
                yield arch, [*beside, f"{flag}={value}"], [flag, value.replace("1e400", "inf")]
    for flag, value in COMPOSED:
        yield LM, [f"{flag}={value}"], [flag, value]
    for value, named in UNREAD:
        yield LM, [f"--attention-normalizer-at={value}"], [named]
    for arch, words, named in PAIRS:
        yield arch, words.split(), [named]


def child():
    """Print what is said of each case; of one that is taken, or unexplained, what is not."""
    sys.argv = ["fairseq-train"]
    from conftest import sizes_of
    from fairseq import criterions, optim, options, tasks
    from fairseq.data import Dictionary
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    from multimax_fairseq import compat
    from multimax_fairseq.compat.settings import check_criterion
    from multimax_fairseq.mappings.table import settings_of
    from multimax_fairseq.models.config import MAPPINGS, TranslationConfig, check_settings

    words = Dictionary()
    for index in range(30):
        words.add_symbol(f"word{index}")
    names = ("source_dictionary", "target_dictionary", "src_dict", "tgt_dict")
    task = types.SimpleNamespace(**dict.fromkeys(names, words))

    def start(arch, flags):
        name = "language_modeling" if arch == LM else "translation"
        parser = options.get_training_parser(name)
        words = ["data", "--task", name, "--arch", arch, *sizes_of(arch), *flags]
        args = options.parse_args_and_arch(parser, words)
        cfg = convert_namespace_to_omegaconf(args)
        model = tasks.FairseqTask.build_model(task, cfg.model if arch == LM else args)
        check_criterion(model, criterions.build_criterion(args, task))
        if cfg.optimizer is not None:
            optim.build_optimizer(cfg.optimizer, list(model.parameters()))

    def owned(name, value, mapping):
        settings = types.SimpleNamespace(**vars(TranslationConfig()))
        settings.output_normalizer, settings.attention_normalizer = "softmax", mapping
        setattr(settings, name, value)
        check_settings(settings)

    def said(call):
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed):
            try:
                call()
            except SystemExit as end:
                assert end.code == 2
                return re.sub("^fairseq-train: error: ", "", printed.getvalue().strip())
            except Exception as error:
                return compat.explain(error) or f"Traceback: {error!r}"
        return "taken"

    def order(command, words):
        sys.argv = [command]
        made = {
            "fairseq-generate": options.get_generation_parser,
            "fairseq-interactive": options.get_interactive_generation_parser,
            "fairseq-validate": functools.partial(options.get_validation_parser, "translation"),
            "fairseq-eval-lm": options.get_eval_lm_parser,
        }
        args = options.parse_args_and_arch(
            made[command](), ["data", "--path", "model.pt", *words.split()]
        )
        tasks.FairseqTask.build_generator(task, [], args)

    answers = [said(functools.partial(start, arch, flags)) for arch, flags, _ in cases()]
    answers += [said(functools.partial(order, command, words)) for command, words, _ in COMMANDS]
    others = {
        f"{name} {mapping}": said(functools.partial(owned, name, value, mapping))
        for name, value in GOOD.items()
        for mapping, entry in MAPPINGS.items()
        if name not in settings_of(entry)
    }
    print(json.dumps([answers, others]))


if __name__ == "__main__":
    child()
