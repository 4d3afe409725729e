"""The training that is watched: a model that can be checked by hand, and the loop around it, the same in every stage.

The gradient of a weight is what the batch holds for it: 100 r + 20 s + e for element e (from 1 on) on rank r in step s.
"""

import torch


class Weigh(torch.autograd.Function):  # adds weight · inputs to hidden: the gradient of weight is `inputs`
    @staticmethod
    def forward(context, hidden, weight, inputs):
        context.save_for_backward(inputs)
        return hidden + (weight * inputs).sum()

    @staticmethod
    def backward(context, grad):
        return grad, grad * context.saved_tensors[0], None


class Layer(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, hidden, inputs):
        return Weigh.apply(hidden, self.weight, inputs)


class Model(torch.nn.Module):
    def __init__(self, weights, order):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(weight) for weight in weights)
        self.order = order  # of the layers in a forward pass

    def forward(self, batch):
        hidden = torch.zeros((), dtype=batch[0].dtype, requires_grad=True)
        for index in self.order:
            hidden = self.layers[index](hidden, batch[index])
        return hidden


def train(model, optimizer, batches):
    for batch in batches:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train_without_zero_grad(model, optimizer, batches):
    for batch in batches:
        loss = model(batch)
        loss.backward()
        optimizer.step()
