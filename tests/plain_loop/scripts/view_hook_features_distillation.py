# expect: whole: changes the global variable features
# Forward hooks put features of a student and a teacher into a dict of the script.
import torch.nn.functional as F
from common import perceptron, report, train

student = perceptron()
teacher = perceptron()
teacher.requires_grad_(False)
features = {}
# + student = samestep.parallel(student)
# + teacher = samestep.parallel(teacher)


def keep_student(module, arguments, output):
    features["student"] = output


def keep_teacher(module, arguments, output):
    features["teacher"] = output


student[0].register_forward_hook(keep_student)
teacher[0].register_forward_hook(keep_teacher)


def loss_function(x, y):
    output = student(x)
    teacher(x)
    return F.cross_entropy(output, y) + F.mse_loss(features["student"], features["teacher"])


losses = train(student, loss_function)
report(losses, student)
