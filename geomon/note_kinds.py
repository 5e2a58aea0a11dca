"""Kinds of notes: their meaning, advice on how to react, and the values that they touch."""

from enum import StrEnum

_ATTENTION = "metrics of attention"
_ALL = "all of the reading"
_HIDDEN = "metrics of hidden states"
_PROJECTED = "metrics of queries and keys as projected"
_DIMENSIONS = "`twonn` and the other intrinsic dimensions"
_NOTHING = "Nothing needs to be done."


class NoteKind(StrEnum):
    """Kind of a note. The sentences of a kind may change between versions, its name does not.

    Attributes:
        meaning: The finding, in one sentence.
        to_do: Advice on how to react.
        values: Values that are missing, or mean something else than usual.

    Example:
        >>> NoteKind.FEW_ROWS, NoteKind("few rows").values
        (<NoteKind.FEW_ROWS: 'few rows'>, '`twonn` and the other intrinsic dimensions')
    """

    meaning: str
    to_do: str
    values: str

    def __new__(cls, name: str, meaning: str, to_do: str, values: str) -> "NoteKind":
        """Make a kind that equals its name."""
        kind = str.__new__(cls, name)
        kind._value_ = name
        kind.meaning, kind.to_do, kind.values = meaning, to_do, values
        return kind

    # -- rows --------------------------------------------------------------------------------------

    FEW_ROWS = (
        "few rows",
        "The batch had fewer rows than `tokens` asks for.",
        "Compare only with readings of as many rows, or measure larger batches by a probe.",
        _DIMENSIONS,
    )
    ROWS_NOT_FINITE = (
        "rows not finite",
        "Some rows hold NaN or infinity and were left out.",
        "Look at the loss and the data type, and for the first step with it.",
        "all of the layers that are named",
    )
    ROWS_BEYOND_SPLITS = (
        "rows beyond the last split",
        "`geometry` measures whole splits, and the rows after the last one were left out.",
        "Choose `tokens` so that it divides the number of rows.",
        "`geometry`",
    )
    ROWS_THINNED = (
        "rows thinned for memory",
        "Fewer rows are kept, because `max_capture_mb` limits what a window may hold.",
        "Raise `max_capture_mb`, or compare only with readings of as many rows.",
        _DIMENSIONS,
    )
    EQUAL_ROWS = (
        "fewer than 3 different rows",
        "Fewer than three rows differ from one another, so there is no dimension.",
        "Look for a collapsed layer, or a batch of equal tokens.",
        _DIMENSIONS,
    )
    DUPLICATES = (
        "exact copies",
        "Many rows are exact copies of others, and were left out of the dimension.",
        "Read `twonn_distinct`, which counts each token at each position once.",
        "`twonn`",
    )
    NEAR_DUPLICATES = (
        "twonn and twonn_distinct disagree",
        "Near-duplicates change the dimension by half or more.",
        "Read `twonn_distinct` too, which counts each token at each position once.",
        "`twonn`",
    )
    SCALES_DIFFER = (
        "gride changes with the scale",
        "The dimension at a large scale is at least twice as high or low as at a small one.",
        "Name the scale with the number; `gride` has one for each.",
        _DIMENSIONS,
    )
    ROUNDING = (
        "rounded rows",
        "Much of the distance to the nearest row comes from the rounding of the data type.",
        "Capture in float32, or trust only larger scales (`gride`).",
        _DIMENSIONS,
    )
    MASSIVE_ROWS = (
        "massive rows",
        "A few rows of huge norm carry most of the variance.",
        "Read `anisotropy_without_massive`.",
        "`anisotropy` and other spectra",
    )

    # -- tokens ------------------------------------------------------------------------------------

    PADDING = (
        "padding",
        "A mask shows padding, which was left out.",
        _NOTHING,
        "all metrics of rows: they count tokens only",
    )
    MASK_WITHOUT_TOKENS = (
        "mask without tokens",
        "An argument named like a padding mask leaves no token, so it is not read as one.",
        "Invert the mask, or call the argument `padding_mask`.",
        "all metrics of rows, if the batch has padding",
    )
    PADDING_MAY_COUNT = (
        "padding may be counted",
        "An argument may mark padding, but its meaning is not known.",
        "Pass the model a mask [batch, length] as `attention_mask`.",
        "all metrics of rows",
    )
    PADDING_OF_OTHER_LENGTH = (
        "padding of another length",
        "Padding is known only for sequences of another length.",
        "Pass a mask of the length of these hidden states.",
        _HIDDEN,
    )
    ONE_TOKEN = (
        "one token in many rows",
        "One token makes up a large part of the rows.",
        "If it is padding, pass an attention mask.",
        "all metrics of rows",
    )
    PACKED = (
        "packed sequences",
        "A row of the batch holds several sequences; each counts separately.",
        _NOTHING,
        "intervals, and metrics of last tokens",
    )
    ACROSS_SEQUENCES = (
        "keys of other sequences",
        "Queries see keys of other sequences that are packed into the same row.",
        "If you pack, separate sequences by a mask or `position_ids`.",
        _ATTENTION,
    )
    ODD_POSITIONS = (
        "odd positions",
        "Positions start elsewhere than at 0, or repeat within a row.",
        "Look at how `position_ids` are made.",
        "none, but the model sees other positions than usual",
    )
    STREAMS = (
        "several rows of each token",
        "The model has several streams of hidden states, measured together.",
        "Read `twonn_distinct`: similar rows of one token are near-duplicates.",
        _HIDDEN,
    )
    ROUTED = (
        "fewer tokens than other blocks",
        "A block received fewer tokens than others, and it is not known which.",
        "Compare its values only with its own earlier ones.",
        "`twonn_distinct` and metrics of positions",
    )

    # -- attention ---------------------------------------------------------------------------------

    BY_NAME_ALONE = (
        "attention by name alone",
        "A module is named attention, but neither its queries and keys nor its scores were seen.",
        "Write it with torch's functions, if it is a softmax over keys.",
        _ATTENTION,
    )
    ATTENTION_NOT_CALLED = (
        "attention not called",
        "A second attention of the block did not run in this pass.",
        _NOTHING,
        "metrics of that attention",
    )
    CALLED_AGAIN = (
        "attention called again",
        "A block calls attention more than once, and one call is measured.",
        "Give the second attention a module of its own to measure both.",
        _ATTENTION,
    )
    WEIGHTS_CHANGED = (
        "weights changed after the softmax",
        "The model changes the weights of the softmax before it mixes values with them.",
        "Remember that values describe the softmax.",
        "entropy and the other metrics of attention weights",
    )
    OTHER_KEYS = (
        "keys of other tokens",
        "Some keys belong to other tokens, such as another stack's, and are left out.",
        _NOTHING,
        _PROJECTED,
    )
    TOKENS_LEFT_OUT = (
        "tokens left out of projections",
        "Queries or keys of some tokens were not traced to products with weights.",
        _NOTHING,
        _PROJECTED,
    )
    AS_ATTENDED = (
        "queries and keys as attended",
        "Queries and keys were not traced to products with weights.",
        "Remember that rotary positions are in these values.",
        _PROJECTED,
    )
    OUTSIDE_BLOCKS = (
        "attention outside the blocks",
        "Attention was seen outside the watched blocks, but not inside them.",
        "Look at `print(geomon.describe(model))`, and name the blocks with `blocks=`.",
        _ALL,
    )

    # -- what differs from the rest of the model ---------------------------------------------------

    LATER_KEYS = (
        "keys after the query",
        "A layer sees later keys while most layers see none.",
        "Look at its mask: a decoder that sees its labels learns nothing.",
        "none, but the layer computes something else",
    )
    OTHER_SCALE = (
        "another scale of the scores",
        "A layer scales its scores by another factor than most layers.",
        "Look at the configuration and the code of this layer.",
        "none, but the layer computes something else",
    )
    UNUSUAL_SCALE = (
        "scale of the scores",
        "All layers scale their scores, but not by one over the root of the head's width.",
        "Nothing needs to be done if the architecture means it so (T5 does).",
        "none",
    )
    UNIFORM = (
        "uniform attention",
        "A layer attends uniformly while most layers do not.",
        "Look for queries or weights of 0, or weights that were never loaded.",
        "none, but the layer computes something else",
    )
    EQUAL_HEADS = (
        "equal heads",
        "Heads of a layer attend alike, number for number.",
        "Look for heads that were copied when weights were converted.",
        "none, but the layer computes something else",
    )
    LARGER = (
        "hidden states much larger",
        "Hidden states are more than a hundred times larger than one layer before.",
        "Look at the norms of the block's weights, and at its norm.",
        "none, but the layer stands out",
    )
    SMALLER = (
        "hidden states much smaller",
        "Hidden states are more than a hundred times smaller than one layer before.",
        "Look at the norms of the block's weights, and at its norm.",
        "none, but the layer stands out",
    )
    TIES = (
        "ties",
        "The configuration ties embedding and unembedding, and the weights are two; or the other "
        "way.",
        "Look at how the weights were loaded or replaced (`model.tie_weights()`).",
        "none, but the model is another than its configuration says",
    )

    # -- blocks ------------------------------------------------------------------------------------

    SUMS_OUTSIDE = (
        "sums outside the blocks",
        "Blocks return branches, and the model adds their input outside of them.",
        "Nothing needs to be done: layers are the sums.",
        _HIDDEN,
    )
    SEVERAL_OUTPUTS = (
        "several outputs",
        "Blocks return several tensors of the shape of hidden states; the first is measured.",
        "If the hidden state is their sum, let the block return it.",
        _HIDDEN,
    )
    OUTPUTS_OF_OTHER_LENGTHS = (
        "outputs of other lengths",
        "Blocks return tensors of different lengths, such as text and image; one is measured.",
        _NOTHING,
        _HIDDEN,
    )
    UNSEEN_BETWEEN = (
        "unseen between blocks",
        "A block's input is not the output of the block before, and what happens between was not "
        "seen.",
        "Add a metric of attention, or measure by a probe outside compiled code.",
        _HIDDEN,
    )
    SIDE_BY_SIDE = (
        "blocks side by side",
        "Blocks receive the same hidden states.",
        "Do not read values as a profile over depth.",
        _HIDDEN,
    )
    CALLED_ON_OTHERS = (
        "blocks called on something else",
        "Blocks are called again, on something other than the last block's output.",
        "Compare layers only with their own earlier values.",
        _HIDDEN,
    )
    RAN_SEVERAL_TIMES = (
        "blocks ran several times",
        "The blocks ran more than once in a pass; the first run is measured.",
        _NOTHING,
        _ALL,
    )
    STACK_LEFT_OUT = (
        "stack left out",
        "A stack of blocks did not run although others did.",
        _NOTHING,
        "all of that stack",
    )
    BLOCKS_LEFT_OUT = (
        "blocks left out",
        "A large family of blocks is not watched.",
        "Pass `blocks=` with a regular expression that matches the names of all blocks.",
        "all of these blocks",
    )
    OTHER_BLOCKS = (
        "other blocks",
        "The model has other blocks than when the run began.",
        "Start a record of its own after a change of the model.",
        _ALL,
    )
    ADAPTED_MATRIX = (
        "matrix without its adapter",
        "A matrix has an adapter around it, whose contribution its rows do not have.",
        "Merge the adapter to measure both.",
        "metrics of the matrix",
    )

    # -- how it was measured -----------------------------------------------------------------------

    WATCHING_FAILED = (
        "watching failed",
        "Watching a call raised an error; the training went on.",
        "Report it with the sentence, please.",
        "what the call would have shown",
    )
    TORCH_LACKS = (
        "torch lacks a function",
        "This version of torch lacks a function that geomon reads by.",
        "Install a version that CI tests (`constraints.txt`).",
        "named in the sentence",
    )
    RAN_EAGERLY = (
        "compiled code ran eagerly",
        "Compiled code of the training ran eagerly while it was watched.",
        "Measure by a probe to leave it compiled.",
        "none, but dropout draws other numbers in this step",
    )
    EXTRA_PASS = (
        "extra pass",
        "An extra pass was made: what the model keeps outside of its modules stays changed.",
        "Look whether forward() changes a list, a counter or a generator.",
        "none",
    )
    PARTS_OF_BATCH = (
        "parts of a batch",
        "The model gets only the parts of the batch that its forward() takes.",
        "Pass `probe` exactly what the model takes, if another part matters.",
        _ALL,
    )
    ON_HOST = (
        "measured on the host",
        "Rows were measured on the CPU.",
        "Free memory of the device, if that is the reason named.",
        "none, but a reading takes longer",
    )
    IN_THREAD = (
        "measured in a thread",
        "Rows were measured in a thread beside the training, and not in a process.",
        "The sentence names the reason.",
        "none, but the training waits longer",
    )
    FEW_READINGS = (
        "few readings",
        "The run can pay for few readings.",
        "Raise `budget`, set `schedule`, or choose fewer `metrics` or `tokens`.",
        "phases and trends",
    )
    OTHER_SETTINGS = (
        "other settings",
        "The run was resumed with settings that change values.",
        "Compare only readings on the same side of that step.",
        _ALL,
    )
    CHECKPOINT_LEFT_OUT = (
        "checkpoint left out",
        "`scan` could not load or measure a checkpoint.",
        "Read the reason, and scan again.",
        "none of the other checkpoints",
    )

    # -- values ------------------------------------------------------------------------------------

    NO_VALUE = (
        "no value",
        "A metric reads something that was not seen at these layers.",
        "The sentence names the reason and what would show it.",
        "named in the sentence",
    )
    FAILED = (
        "metric failed",
        "A metric raised an error; the others were measured.",
        "If it is your own metric, look at it with `measure`; else report it, please.",
        "named in the sentence",
    )
    NOT_FINITE = (
        "value not finite",
        "A value is NaN or infinite.",
        "The sentence names the reason.",
        "named in the sentence",
    )
    NO_MARGIN = (
        "no margin",
        "A value has no 95 % interval.",
        "The sentence names the reason.",
        "the margin",
    )
    NO_ARRAYS = (
        "no arrays",
        "The arrays behind some figures could not be kept.",
        "The sentence names the reason.",
        "figures of single heads and rows",
    )
    NO_INTERVALS = (
        "no intervals",
        "The reading has too few sequences for intervals.",
        "Measure more sequences in a reading: larger batches, or a probe.",
        "all margins",
    )
    NO_INTERVALS_OF_ATTENTION = (
        "no intervals of attention",
        "The sampled queries come from too few sequences for intervals.",
        "Raise `tokens`, which takes them from more sequences.",
        "margins of the metrics that are named",
    )
    FEW_SEQUENCES = (
        "few sequences for a spectrum",
        "A spectrum of last tokens rests on fewer than two sequences for each dimension.",
        "Compare only with readings of as many sequences.",
        "the metrics that are named",
    )
    SPECTRAL_ROWS = (
        "spectra of fewer rows",
        "Spectra of wide layers use fewer rows than other values.",
        _NOTHING,
        "`anisotropy`, `effective_rank`, `participation_ratio`",
    )

    # -- ranks -------------------------------------------------------------------------------------

    NOT_GATHERED = (
        "not gathered",
        "Rows of other ranks were not gathered; rank 0's are measured.",
        "The sentence names the reason.",
        _ALL,
    )
    PART_OF_MODEL = (
        "part of the model",
        "Only this rank's part of the model is measured.",
        "Call `Monitor` on all ranks to gather the rest.",
        _ALL,
    )
    PROBES_DIFFER = (
        "probes differ",
        "The ranks probe with different inputs; rank 0's were measured.",
        "Give all ranks the same probe.",
        _ALL,
    )
    MODES = (
        "modes",
        "Some ranks were in train mode and some in eval mode.",
        "Call `model.train()` or `model.eval()` on all ranks alike.",
        _ALL,
    )
    UNSEEN_ON_RANKS = (
        "not seen on some ranks",
        "Some ranks saw nothing, or less than the others, of a layer.",
        "The sentence names the rank and the reason.",
        "all of the layers that are named: other ranks' rows count",
    )
    SAME_TOKENS = (
        "ranks with the same tokens",
        "Ranks that should have different data have the same tokens; they are counted once.",
        "If each rank should have tokens of its own, look at the data loader.",
        _ALL,
    )
    OTHER_TOKENS = (
        "other tokens",
        "Ranks that share one model received different tokens.",
        "Give ranks of one tensor-parallel group the same batches.",
        _ALL,
    )


__all__ = ["NoteKind"]
