"""A stand-in for ``pynvml``, NVIDIA's package for NVML, and the driver behind it."""

from types import ModuleType, SimpleNamespace

UUIDS = ("GPU-aa11", "GPU-aa22", "GPU-bb33")
GIGABYTE = 2**30
# The codes of ``nvml.h``.
NOT_SUPPORTED, NOT_FOUND, NOT_LOADED, NO_LIBRARY, NO_FUNCTION = 3, 6, 9, 12, 13


class NVMLError(Exception):
    """An answer of the driver that is an error."""

    def __init__(self, value):
        super().__init__(f"error {value}")
        self.value = value


NAMES = {
    NOT_SUPPORTED: "NVMLError_NotSupported",
    NOT_LOADED: "NVMLError_DriverNotLoaded",
    NO_LIBRARY: "NVMLError_LibraryNotFound",
}
CLASSES = {code: type(name, (NVMLError,), {}) for code, name in NAMES.items()}
QUESTIONS = (
    "MaxClockInfo",
    "MemoryBusWidth",
    "GpuMaxPcieLinkGeneration",
    "MaxPcieLinkWidth",
    "C2cModeInfoV",
)
"""What is asked about a GPU beside its memory and its use."""


class Driver(ModuleType):
    """The module ``pynvml`` on a machine with GPUs of the given UUIDs.

    Args:
        uuids: of the GPUs, in order.
        sizes: of their memory in GB; None for one that does not say.
        status: the answer to the first call.
        counting: the answer to the question how many there are.

    Attributes:
        calls: the names of the functions that were called, in order.
        open: how often it was started and not ended.
    """

    NVML_CLOCK_MEM = 2
    NVMLError = NVMLError

    def __init__(self, uuids=UUIDS, sizes=(8, 8, 8), status=0, counting=0):
        super().__init__("pynvml")
        self.open, self.calls = 0, []
        self._uuids, self._sizes = uuids, sizes
        self._status, self._counting = status, counting
        self._answers = {}
        for cls in CLASSES.values():
            setattr(self, cls.__name__, cls)
        for question in QUESTIONS:
            setattr(self, f"nvmlDeviceGet{question}", self._ask(question))

    def answer(self, **answers):
        """Answer further questions, each with a number; None is a driver that does not know."""
        self._answers = answers

    def nvmlInit(self):  # noqa: N802
        self._note("nvmlInit", self._status)
        self.open += 1

    def nvmlShutdown(self):  # noqa: N802
        self._note("nvmlShutdown", 0)
        self.open -= 1

    def nvmlDeviceGetCount(self):  # noqa: N802
        self._note("nvmlDeviceGetCount", self._counting)
        return len(self._uuids)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        self._note("nvmlDeviceGetHandleByIndex", 0)
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        self._note("nvmlDeviceGetHandleByUUID", 0 if uuid in self._uuids else NOT_FOUND)
        return self._uuids.index(uuid)

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        self._note("nvmlDeviceGetUUID", 0)
        return self._uuids[handle]

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        size = self._sizes[handle]
        self._note("nvmlDeviceGetMemoryInfo", NOT_SUPPORTED if size is None else 0)
        return SimpleNamespace(total=size * GIGABYTE)

    def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802
        is_known = self._sizes[handle] is not None
        self._note("nvmlDeviceGetUtilizationRates", 0 if is_known else NOT_SUPPORTED)
        return SimpleNamespace(gpu=10 * (handle + 1))

    def _ask(self, question):
        def ask(handle, *options):
            value = self._answers.get(question)
            unknown = NOT_SUPPORTED if question in self._answers else NO_FUNCTION
            self._note(f"nvmlDeviceGet{question}", unknown if value is None else 0)
            return SimpleNamespace(isC2cEnabled=value) if question == "C2cModeInfoV" else value

        return ask

    def _note(self, name, status):
        assert self.open or name == "nvmlInit", f"{name} of an NVML that was not started"
        self.calls.append(name)
        if status:
            raise CLASSES.get(status, NVMLError)(status)
