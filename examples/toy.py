"""toy: NumPy's arrays on a CPU and two devices, their gradients, layers and optimizers."""

import operator
from contextvars import ContextVar

import numpy as np

DEVICES = ("cpu", "toy:0", "toy:1")
random = np.random.RandomState(0)  # of dropout, and of arrays that are drawn without a seed


class Array:
    """A NumPy array that is on a device."""

    is_parameter = False

    def __init__(self, values, device="cpu"):
        self.values, self.device = np.asarray(values), device
        self.shape, self.dtype, self.ndim = self.values.shape, self.values.dtype, self.values.ndim

    def __getitem__(self, index):
        return apply(operator.getitem, self, index)

    def __setitem__(self, index, value):
        apply(operator.setitem, self, index, value)

    def sum(self):
        return apply(np.sum, self)

    def __neg__(self):
        return apply(np.negative, self)

    def __float__(self):
        return float(self.values)

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()


def convert(value, x):
    """Return a number in the dtype of an array: NumPy would compute in float64."""
    is_number = isinstance(value, (int, float)) and x.dtype.kind == "f"
    return x.dtype.type(value) if is_number else value


for name in ("add", "sub", "mul", "truediv", "matmul", "pow", "lt", "gt"):
    f = getattr(operator, name)
    setattr(Array, f"__{name}__", lambda x, y, f=f: apply(f, x, convert(y, x)))
    if name not in ("lt", "gt"):
        setattr(Array, f"__r{name}__", lambda x, y, f=f: apply(f, convert(y, x), x))

# The operations in ``value_and_grad``, in their order.
tape: ContextVar = ContextVar("tape", default=None)
GRADIENTS: dict = {}  # of each operation: from the gradient of its result to those of its operands


def apply(function, *operands):
    """Compute with NumPy; the result is on the device of the first array."""
    device = next(x.device for x in operands if isinstance(x, Array))
    values = [getattr(x, "values", x) for x in operands]
    result = Array(function(*values), device)
    if (operations := tape.get()) is not None:
        operations.append((function, operands, values, result))
    return result


def value_and_grad(function, arrays):
    """Return ``(loss, *others)`` of a function, and the gradients of the loss by some arrays."""
    token = tape.set([])
    try:
        results = function()
        operations = tape.get()
    finally:
        tape.reset(token)
    errors = {id(results[0]): np.ones_like(results[0].values)}
    for called, operands, values, result in reversed(operations):
        if (error := errors.pop(id(result), None)) is None:
            continue
        if called not in GRADIENTS:
            raise TypeError(f"{called.__name__} has no gradient")
        found = GRADIENTS[called](error, result.values, *values)
        for x, each in zip(operands, found, strict=True):
            if isinstance(x, Array) and each is not None:
                errors[id(x)] = errors.get(id(x), 0) + shrink(each, x.shape)
    return results, [Array(errors.get(id(x), np.zeros_like(x.values)), x.device) for x in arrays]


def shrink(error, shape):
    """Return the sums of a gradient over the axes along which an operand was repeated."""
    error = error.sum(tuple(range(error.ndim - len(shape))))
    axes = tuple(i for i, length in enumerate(shape) if length < error.shape[i])
    return error.sum(axes, keepdims=True)


def operation(gradient, function=None):
    """Return a function of arrays that computes a function of NumPy's arrays."""
    if function is None:
        return lambda function: operation(gradient, function)
    GRADIENTS[function] = gradient
    return lambda *operands: apply(function, *operands)


def scatter(error, z, x, index):
    whole = np.zeros_like(x)
    np.add.at(whole, index, error)
    return whole, None


operation(scatter, operator.getitem)
operation(lambda e, z, x, y: (e, e), operator.add)
operation(lambda e, z, x, y: (e, -e), operator.sub)
operation(lambda e, z, x, y: (e * y, e * x), operator.mul)
operation(lambda e, z, x, y: (e / y, -e * z / y), operator.truediv)
operation(lambda e, z, x, y: (e * y * x ** (y - 1), None), operator.pow)
operation(lambda e, z, x, y: (e @ y.T, x.T @ e), operator.matmul)
operation(lambda e, z, x: (-e,), np.negative)
operation(lambda e, z, x: (np.broadcast_to(e, x.shape),), np.sum)
where = operation(lambda e, z, c, x, y: (None, np.where(c, e, 0), np.where(c, 0, e)), np.where)
relu = operation(lambda e, z, x: (e * (z > 0),), lambda x: np.maximum(x, 0))
stop_gradient = operation(lambda e, z, x: (None,), np.copy)
tanh = operation(lambda e, z, x: (e * (1 - z * z),), np.tanh)
sigmoid = operation(lambda e, z, x: (e * z * (1 - z),), lambda x: 1 / (1 + np.exp(-x)))


@operation(lambda e, z, x, w, b: (e @ w, rows(e).T @ rows(x), rows(e).sum(0)))
def linear(x, weight, bias):
    return x @ weight.T + bias


def rows(x):
    return x.reshape(-1, x.shape[-1])


@operation(lambda e, z, x: (np.broadcast_to(e / len(rows(x)), x.shape),))
def mean_of_rows(x):
    return rows(x).mean(0)


@operation(lambda e, z, x: (e - np.exp(z) * e.sum(-1, keepdims=True),))
def log_softmax(x):
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@operation(lambda e, z, x, y: (e * (np.exp(-np.logaddexp(0, -x)) - y), None))
def binary_entropy(x, y):
    return np.maximum(x, 0) - x * y + np.log1p(np.exp(-abs(x)))


class Dense:
    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias
        weight.is_parameter = bias.is_parameter = True

    def __call__(self, x, is_training):
        return linear(x, self.weight, self.bias)


class Activation:
    def __init__(self, name):
        self.name = name

    def __call__(self, x, is_training):
        return {"relu": relu, "tanh": tanh, "sigmoid": sigmoid}[self.name](x)


class Normalize:
    """Subtract the mean of each feature. The buffer ``mean`` is for evaluation."""

    def __init__(self, mean):
        self.mean = mean

    def __call__(self, x, is_training):
        if not is_training:
            return x - self.mean
        mean = mean_of_rows(x)
        self.mean.values[...] = 0.9 * self.mean.values + 0.1 * mean.values
        return x - mean


class Dropout:
    def __init__(self, rate):
        self.rate = rate

    def __call__(self, x, is_training):
        if not is_training:
            return x
        kept = random.random_sample(x.shape) >= self.rate
        return x * Array((kept / (1 - self.rate)).astype(x.dtype), x.device)


class Model:
    def __init__(self, *layers):
        self.layers, self.is_training = list(layers), True

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x, self.is_training)
        return x

    def parameters(self):
        return [
            x for each in self.layers if isinstance(each, Dense) for x in (each.weight, each.bias)
        ]


class Optimizer:
    def __init__(self, parameters, lr):
        self.parameters, self.lr = list(parameters), lr


class SGD(Optimizer):
    """Gradient descent with momentum: ``velocity`` has an array for each parameter."""

    def __init__(self, parameters, lr=0.01, momentum=0.9):
        super().__init__(parameters, lr)
        self.momentum, self.velocity = momentum, [x * 0 for x in self.parameters]

    def step(self, gradients):
        for x, velocity, gradient in zip(self.parameters, self.velocity, gradients, strict=True):
            velocity.values[...] = self.momentum * velocity.values + gradient.values
            x.values[...] -= self.lr * velocity.values


class Adam(Optimizer):
    """Adam; with ``decay`` it is AdamW."""

    def __init__(self, parameters, lr=0.001, betas=(0.9, 0.999), epsilon=1e-8, decay=0.0):
        super().__init__(parameters, lr)
        self.betas, self.epsilon, self.decay = betas, epsilon, decay
        self.first, self.second = ([x * 0 for x in self.parameters] for _ in range(2))
        self.steps = Array(np.zeros(()), self.parameters[0].device)

    def step(self, gradients):
        self.steps.values[...] += 1
        scales = [1 - beta ** float(self.steps) for beta in self.betas]
        lists = self.parameters, self.first, self.second, gradients
        for x, *moments, gradient in zip(*lists, strict=True):
            x.values[...] *= 1 - self.lr * self.decay
            for power, (moment, beta) in enumerate(zip(moments, self.betas, strict=True), 1):
                moment.values[...] = beta * moment.values + (1 - beta) * gradient.values**power
            first, second = (x.values / scale for x, scale in zip(moments, scales, strict=True))
            x.values[...] -= self.lr * first / (np.sqrt(second) + self.epsilon)


class AdaGrad(Optimizer):
    def __init__(self, parameters, lr=0.01, epsilon=1e-10):
        super().__init__(parameters, lr)
        self.epsilon, self.squares = epsilon, [x * 0 for x in self.parameters]

    def step(self, gradients):
        for x, squares, gradient in zip(self.parameters, self.squares, gradients, strict=True):
            squares.values[...] += gradient.values**2
            x.values[...] -= self.lr * gradient.values / (np.sqrt(squares.values) + self.epsilon)
