// Every operation that has no kernel of its own here runs torch's CPU kernel on the bytes of the device.
#include "standin.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <mutex>
#include <set>
#include <string>

namespace standin {
namespace {

using c10::IValue;
using torch::jit::Stack;

// Torch's own accelerators take indices from the host too, and move them.
const std::set<std::string> kTakesHostIndices = {"aten::index", "aten::index_put_", "aten::_index_put_impl_",
                                                 "aten::index_put", "aten::_unsafe_index"};

// CPU kernels that draw from the host's default generator: while one runs, that has the state of the
// device's.
class BorrowedRandomState {
public:
    explicit BorrowedRandomState(c10::DeviceIndex device)
        : of_device_(drawing_generator(default_generator(device))),
          of_host_(at::detail::getDefaultCPUGenerator()), kept_(of_host_.get_state()) {
        of_host_.set_state(of_device_.get_state());
    }
    ~BorrowedRandomState() {
        of_device_.set_state(of_host_.get_state());
        of_host_.set_state(kept_);
    }
    BorrowedRandomState(const BorrowedRandomState &) = delete;
    BorrowedRandomState &operator=(const BorrowedRandomState &) = delete;

private:
    at::Generator of_device_;
    at::Generator of_host_;
    at::Tensor kept_;
};

// One call of an operation, with its arguments on the host's side and its results on the device's.
class Call {
public:
    Call(const c10::OperatorHandle &op, Stack *stack)
        : op_(op), schema_(op.schema()), stack_(stack), first_(stack->size() - schema_.arguments().size()) {}

    void run() {
        find_device();
        finish(current_stream(device_.index()));
        for (std::size_t i = 0; i < schema_.arguments().size(); ++i) {
            translate(schema_.arguments()[i], (*stack_)[first_ + i]);
        }
        c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
        {
            std::optional<BorrowedRandomState> borrowed;
            if (!has_generator_ && op_.hasTag(at::Tag::nondeterministic_seeded)) {
                borrowed.emplace(device_.index());
            }
            op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
        }
        for (const auto &[on_device, on_host] : grown_) {
            take_grown(on_device, on_host);
        }
        for (std::size_t i = stack_->size() - schema_.returns().size(); i < stack_->size(); ++i) {
            translate_back((*stack_)[i]);
        }
    }

private:
    void find_device() {
        for (std::size_t i = first_; i < stack_->size(); ++i) {
            const IValue &value = (*stack_)[i];
            if (value.isDevice() && value.toDevice().type() == kType) {
                const auto index = value.toDevice().index();
                saw({kType, index < 0 ? current_device() : index});
            }
            for_each_tensor(value, [&](const at::Tensor &x) {
                if (is_here(x)) {
                    saw(x.device());
                }
            });
        }
        TORCH_CHECK(has_device_, "stand-in device: ", schema_.name(),
                    " was called without one of its tensors");
    }

    template <typename Function> static void for_each_tensor(const IValue &value, Function function) {
        if (value.isTensor()) {
            function(value.toTensor());
        } else if (value.isTensorList()) {
            for (const at::Tensor &x : value.toTensorVector()) {
                function(x);
            }
        } else if (value.isOptionalTensorList()) {
            for (const std::optional<at::Tensor> &x : value.toOptionalTensorVector()) {
                if (x.has_value()) {
                    function(*x);
                }
            }
        }
    }

    void saw(c10::Device device) {
        if (has_device_ && device != device_) {
            refuse(device);
        }
        device_ = device;
        has_device_ = true;
    }

    [[noreturn]] void refuse(c10::Device other) const {
        TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ",
                    device_, " and ", other, "! (when calling ", schema_.name(), ")");
    }

    void translate(const c10::Argument &argument, IValue &value) {
        const bool is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
        if (value.isTensor()) {
            value = to_host(value.toTensor(), is_written, false);
        } else if (value.isTensorList()) {
            c10::List<at::Tensor> list;
            for_each_tensor(value,
                            [&](const at::Tensor &x) { list.push_back(to_host(x, is_written, false)); });
            value = std::move(list);
        } else if (value.isOptionalTensorList()) {
            c10::List<std::optional<at::Tensor>> list;
            const bool takes_indices = kTakesHostIndices.count(schema_.name()) > 0;
            for (const std::optional<at::Tensor> &x : value.toOptionalTensorVector()) {
                list.push_back(x.has_value() ? std::optional(to_host(*x, is_written, takes_indices)) : x);
            }
            value = std::move(list);
        } else if (value.isDevice() && value.toDevice().type() == kType) {
            value = c10::Device(c10::kCPU);
        } else if (*argument.type() == *c10::getTypePtr<std::optional<at::Generator>>() ||
                   *argument.type() == *c10::getTypePtr<at::Generator>()) {
            value = to_host(value.isNone() ? default_generator(device_.index()) : value.toGenerator());
        }
    }

    at::Generator to_host(const at::Generator &generator) {
        TORCH_CHECK(generator.device().type() == kType, "Expected a '", device_,
                    "' device type for generator but found '", generator.device(), "'");
        has_generator_ = true;
        return drawing_generator(generator);
    }

    at::Tensor to_host(const at::Tensor &x, bool is_written, bool is_index) {
        if (!x.defined()) {
            return x;
        }
        if (!is_here(x)) {
            // Numbers are tensors of the host without dimensions.
            if (is_written || (x.dim() != 0 && !is_index) || !x.device().is_cpu()) {
                refuse(x.device());
            }
            return x;
        }
        if (is_written && x.numel() == 0) { // a result that the kernel may give its size
            auto fresh = at::empty(x.sizes(), x.options().device(c10::kCPU));
            grown_.emplace_back(x, fresh);
            passed_.emplace_back(x, fresh);
            return fresh;
        }
        auto view = views_.view(x);
        passed_.emplace_back(x, view);
        return view;
    }

    static void take_grown(const at::Tensor &on_device, const at::Tensor &on_host) {
        if (on_host.numel() > 0) {
            on_device.resize_(on_host.sizes());
            on_device.copy_(on_host);
        } else if (on_host.sizes() != on_device.sizes()) {
            on_device.resize_(on_host.sizes());
        }
    }

    void translate_back(IValue &value) {
        if (value.isTensor()) {
            value = to_device(value.toTensor());
        } else if (value.isTensorList()) {
            c10::List<at::Tensor> list;
            for_each_tensor(value, [&](const at::Tensor &x) { list.push_back(to_device(x)); });
            value = std::move(list);
        }
    }

    at::Tensor to_device(const at::Tensor &x) {
        if (!x.defined()) {
            return x;
        }
        for (const auto &[on_device, on_host] : passed_) {
            if (x.is_same(on_host)) {
                return on_device;
            }
        }
        if (auto view = views_.back(x)) {
            return *view;
        }
        const auto options = x.options().device(device_);
        auto result = x.is_non_overlapping_and_dense() ? at::empty_strided(x.sizes(), x.strides(), options)
                                                       : at::empty(x.sizes(), options);
        HostViews().view(result).copy_(x);
        return result;
    }

    const c10::OperatorHandle &op_;
    const c10::FunctionSchema &schema_;
    Stack *stack_;
    std::size_t first_;
    c10::Device device_{kType, 0};
    bool has_device_ = false;
    bool has_generator_ = false;
    HostViews views_;
    std::vector<std::pair<at::Tensor, at::Tensor>> passed_; // on the device, on the host
    std::vector<std::pair<at::Tensor, at::Tensor>> grown_;
};

void run_on_host(const c10::OperatorHandle &op, Stack *stack) {
    Call(op, stack).run();
}

// Those of kernels.cpp.
const std::set<std::string> kOfKernels = {"aten::_softmax",
                                          "aten::_log_softmax",
                                          "aten::_softmax_backward_data",
                                          "aten::_log_softmax_backward_data",
                                          "aten::empty",
                                          "aten::empty_strided",
                                          "aten::_copy_from",
                                          "aten::_copy_from_and_resize",
                                          "aten::_local_scalar_dense",
                                          "aten::resize_",
                                          "aten::set_",
                                          "aten::record_stream"};
// Those whose general form would choose another way than on the CPU.
const std::set<std::string> kWhole = {"aten::convolution", "aten::convolution_backward"};

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

// Torch prefers a general form made of other operations to a fallback; where the CPU has a kernel, that is
// used, so that results are those of the CPU to the bit.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    auto &dispatcher = c10::Dispatcher::singleton();
    for (const auto &name : dispatcher.getAllOpNames()) {
        const auto op = dispatcher.findOp(name);
        if (name.name.rfind("aten::", 0) != 0 || !op.has_value() || kOfKernels.count(name.name) > 0) {
            continue;
        }
        const bool has_general =
            op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
            op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) ||
            op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
        const bool is_better = has_general && op->hasKernelForDispatchKey(c10::DispatchKey::CPU);
        if (is_better || kWhole.count(name.name) > 0) {
            const auto full =
                name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
            m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
        }
    }
}

} // namespace
} // namespace standin
