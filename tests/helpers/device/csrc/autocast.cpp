// Autocast with the lists of CUDA, as boxed kernels: one for each policy.
#include "standin.h"

#include <ATen/autocast_mode.h>

#include <string>
#include <vector>

namespace standin {
namespace {

using torch::jit::Stack;

template <typename Function> void cast_all(Stack *stack, std::size_t count, Function cast) {
    for (std::size_t i = stack->size() - count; i < stack->size(); ++i) {
        c10::IValue &value = (*stack)[i];
        if (value.isTensor()) {
            value = cast(value.toTensor());
        } else if (value.isTensorList()) {
            c10::List<at::Tensor> list;
            for (const at::Tensor &x : value.toTensorVector()) {
                list.push_back(cast(x));
            }
            value = std::move(list);
        }
    }
}

void call_cast(const c10::OperatorHandle &op, Stack *stack, at::ScalarType dtype) {
    cast_all(stack, op.schema().arguments().size(), [&](const at::Tensor &x) {
        return x.defined() ? at::autocast::cached_cast(dtype, x, kType) : x;
    });
    op.callBoxed(stack);
}

const c10::DispatchKeySet kAutocast(c10::DispatchKey::AutocastPrivateUse1);

void in_low_precision(const c10::OperatorHandle &op, Stack *stack) {
    const c10::impl::ExcludeDispatchKeyGuard guard(kAutocast);
    call_cast(op, stack, at::autocast::get_autocast_dtype(kType));
}

void in_single_precision(const c10::OperatorHandle &op, Stack *stack) {
    const c10::impl::ExcludeDispatchKeyGuard guard(kAutocast);
    call_cast(op, stack, at::kFloat);
}

// Results in single precision, unless the caller names a dtype.
void into_single_precision(const c10::OperatorHandle &op, Stack *stack) {
    const c10::impl::ExcludeDispatchKeyGuard guard(kAutocast);
    const auto &arguments = op.schema().arguments();
    const auto first = stack->size() - arguments.size();
    const at::Tensor input = (*stack)[first].toTensor();
    for (std::size_t i = 0; i < arguments.size(); ++i) {
        if (arguments[i].name() == "dtype" && (*stack)[first + i].isNone() &&
            at::autocast::is_eligible(input, kType)) {
            (*stack)[first + i] = at::kFloat;
        }
    }
    op.callBoxed(stack);
}

void in_widest_precision(const c10::OperatorHandle &op, Stack *stack) {
    const c10::impl::ExcludeDispatchKeyGuard guard(kAutocast);
    auto dtype = at::autocast::get_autocast_dtype(kType);
    cast_all(stack, op.schema().arguments().size(), [&](const at::Tensor &x) {
        dtype = x.defined() ? at::autocast::prioritize(dtype, x, kType) : dtype;
        return x;
    });
    call_cast(op, stack, dtype);
}

std::string joined(const char *name, const char *overload = nullptr) {
    return overload == nullptr ? name : std::string(name) + "." + overload;
}

#define TEXT1(A) #A
#define TEXT2(A, B) #A, #B
#define PICK(_1, _2, NAME, ...) NAME
#define TEXTS(...) PICK(__VA_ARGS__, TEXT2, TEXT1)(__VA_ARGS__)
#define JOINED(...) joined(TEXTS(__VA_ARGS__)),

const std::vector<std::string> kLow = {AT_FORALL_LOWER_PRECISION_FP(JOINED)};
const std::vector<std::string> kSingle = {AT_FORALL_FP32(JOINED) "norm.Scalar", "norm.ScalarOpt_dim"};
const std::vector<std::string> kIntoSingle = {AT_FORALL_FP32_SET_OPT_DTYPE(JOINED)};
const std::vector<std::string> kWidest = {AT_FORALL_PROMOTE(JOINED)};

template <c10::BoxedKernel::BoxedKernelFunction *function>
void enter(torch::Library &m, const std::vector<std::string> &names) {
    for (const auto &name : names) {
        m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<function>());
    }
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
    enter<&in_low_precision>(m, kLow);
    enter<&in_single_precision>(m, kSingle);
    enter<&into_single_precision>(m, kIntoSingle);
    enter<&in_widest_precision>(m, kWidest);
}

} // namespace
} // namespace standin
