// Operations that make, name or copy memory of the device, and those that take another way than on the CPU.
#include "standin.h"

#include <ATen/EmptyTensor.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/_log_softmax_backward_data.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace standin {
namespace {

using at::Tensor;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::Device chosen(std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                   std::optional<bool> pinned) {
    TORCH_CHECK(layout.value_or(c10::kStrided) == c10::kStrided, "stand-in device: only strided tensors");
    TORCH_CHECK(!pinned.value_or(false), "stand-in device: only tensors of the host can be pinned");
    const auto index = device.has_value() ? device->index() : c10::DeviceIndex{-1};
    return {kType, index < 0 ? current_device() : index};
}

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
             std::optional<c10::Device> device, std::optional<bool> pinned,
             std::optional<c10::MemoryFormat> format) {
    const c10::DeviceGuard guard(chosen(layout, device, pinned));
    return Tensor(
        at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype), format));
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                     std::optional<bool> pinned) {
    const c10::DeviceGuard guard(chosen(layout, device, pinned));
    return Tensor(at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys,
                                                    c10::dtype_or_default(dtype)));
}

void copy_now(const Tensor &source, const Tensor &dest) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    HostViews views;
    const Tensor to = is_here(dest) ? views.view(dest) : dest;
    to.copy_(is_here(source) ? views.view(source) : source);
}

// The same elements, whatever the caller does to the tensor before they are copied.
Tensor same_elements(const Tensor &x) {
    auto result = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(x.storage()),
                                                           x.key_set(), x.dtype());
    result.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
    return result;
}

Tensor copy_from(const Tensor &source, const Tensor &dest, bool non_blocking) {
    const Tensor &of_device = is_here(dest) ? dest : source;
    const Tensor &other = is_here(dest) ? source : dest;
    const auto stream = current_stream(of_device.device().index());
    if (non_blocking && other.is_cpu() && is_pinned_address(other.storage().data())) {
        trace_copy(source, dest, stream, true);
        copy_later(stream, [from = same_elements(source), to = same_elements(dest)] { copy_now(from, to); });
        return dest;
    }
    trace_copy(source, dest, stream, false);
    finish(stream);
    if (is_here(other) && other.device() != of_device.device()) {
        finish(current_stream(other.device().index()));
    }
    copy_now(source, dest);
    return dest;
}

const Tensor &resize(const Tensor &self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
    auto *impl = self.unsafeGetTensorImpl();
    if (self.sizes() != size) {
        impl->set_sizes_contiguous(size);
    }
    if (format.has_value()) {
        impl->empty_tensor_restride(*format);
    }
    const auto needed = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.element_size(),
                                                         self.storage_offset());
    if (self.numel() > 0 && self.storage().nbytes() < needed) {
        TORCH_CHECK(self.storage().resizable(), "Trying to resize storage that is not resizable");
        at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
    }
    return self;
}

Tensor copy_from_and_resize(const Tensor &source, const Tensor &dest) {
    dest.resize_(source.sizes());
    return copy_from(source, dest, false);
}

at::Scalar local_scalar(const Tensor &self) {
    trace("wait number");
    finish(current_stream(self.device().index()));
    return at::_local_scalar_dense(HostViews().view(self));
}

Tensor &set_window(Tensor &self, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                   c10::IntArrayRef stride) {
    TORCH_CHECK(storage.device() == self.device(), "Attempted to set the storage of a tensor on device \"",
                self.device(), "\" to a storage on different device \"", storage.device(), "\"");
    auto *impl = self.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(storage));
    impl->set_storage_offset(offset);
    if (stride.data() == nullptr) {
        impl->set_sizes_contiguous(size);
    } else {
        impl->set_sizes_and_strides(size, stride);
    }
    return self;
}

Tensor &set_storage(Tensor &self, at::Storage storage) {
    const auto count = static_cast<int64_t>(storage.nbytes() / self.element_size());
    return set_window(self, std::move(storage), 0, {count}, {});
}

Tensor &set_tensor(Tensor &self, const Tensor &source) {
    return set_window(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor &set_nothing(Tensor &self) {
    const auto fresh = at::empty({0}, self.options());
    return set_window(self, fresh.storage(), 0, {0}, {});
}

// As for CUDA: the data of a tensor can be exchanged for data on another device.
bool is_exchangeable(const Tensor &self, const Tensor &other) {
    const auto is_plain = [](const Tensor &x) {
        return x.layout() == c10::kStrided && (is_here(x) || x.is_cpu());
    };
    return is_plain(self) && is_plain(other);
}

void record_stream(Tensor & /*self*/, at::Stream /*stream*/) {}

Tensor on_device(const Tensor &host, const c10::Device &device) {
    if (!host.defined()) {
        return host;
    }
    const auto options = host.options().device(device);
    return copy_from(host, at::empty_strided(host.sizes(), host.strides(), options), false);
}

// As on CUDA, half precision may go in and single come out, which CPU kernels do not know.
template <Tensor (*function)(const Tensor &, int64_t, bool)>
Tensor softmax(const Tensor &self, int64_t dim, bool half_to_float) {
    finish(current_stream(self.device().index()));
    HostViews views;
    const Tensor input = views.view(self);
    const Tensor result = function(half_to_float ? input.to(at::kFloat) : input, dim, false);
    return on_device(result, self.device());
}

template <Tensor (*function)(const Tensor &, const Tensor &, int64_t, at::ScalarType)>
Tensor softmax_backward(const Tensor &grad, const Tensor &output, int64_t dim, at::ScalarType dtype) {
    finish(current_stream(grad.device().index()));
    HostViews views;
    const Tensor result = function(views.view(grad), views.view(output), dim, grad.scalar_type());
    return on_device(result.to(dtype), grad.device());
}

// Attention takes the fused way exactly where the CPU does.
int64_t attention_choice(const Tensor &query, const Tensor &key, const Tensor &value,
                         const std::optional<Tensor> &mask, double dropout, bool is_causal,
                         std::optional<double> scale, bool has_groups) {
    HostViews views;
    std::optional<Tensor> host_mask;
    if (mask.has_value() && mask->defined()) {
        host_mask = views.view(*mask);
        host_mask->set_requires_grad(mask->requires_grad());
    }
    const auto choice = at::_fused_sdp_choice(views.view(query), views.view(key), views.view(value),
                                              host_mask, dropout, is_causal, scale, has_groups);
    const bool is_fused = choice == static_cast<int64_t>(at::SDPBackend::flash_attention);
    const auto fused = at::SDPBackend::overrideable; // codespell:ignore overrideable
    return static_cast<int64_t>(is_fused ? fused : at::SDPBackend::math);
}

using Attention =
    std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

Attention attention(const Tensor &query, const Tensor &key, const Tensor &value,
                    const std::optional<Tensor> &mask, double dropout, bool is_causal,
                    bool /*return_debug_mask*/, std::optional<double> scale) {
    finish(current_stream(query.device().index()));
    HostViews views;
    const auto host_mask =
        mask.has_value() && mask->defined() ? std::optional(views.view(*mask)) : std::nullopt;
    const auto [output, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
        views.view(query), views.view(key), views.view(value), dropout, is_causal, host_mask, scale);
    const auto none = [&] { return at::empty({0}, query.options().dtype(at::kLong)); };
    return {on_device(output, query.device()),
            on_device(logsumexp, query.device()),
            none(),
            none(),
            query.sym_size(2),
            key.sym_size(2),
            none(),
            none(),
            none()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor>
attention_backward(const Tensor &grad, const Tensor &query, const Tensor &key, const Tensor &value,
                   const Tensor &mask, std::array<bool, 4> /*needed*/, const Tensor &output,
                   const Tensor &logsumexp, const Tensor & /*starts_q*/, const Tensor & /*starts_k*/,
                   c10::SymInt /*max_q*/, c10::SymInt /*max_k*/, double dropout, bool is_causal,
                   const Tensor & /*seed*/, const Tensor & /*offset*/, std::optional<double> scale) {
    finish(current_stream(query.device().index()));
    HostViews views;
    const auto host_mask = mask.defined() ? std::optional(views.view(mask)) : std::nullopt;
    const auto [d_query, d_key, d_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        views.view(grad), views.view(query), views.view(key), views.view(value), views.view(output),
        views.view(logsumexp), dropout, is_causal, host_mask, scale);
    const auto device = query.device();
    return {on_device(d_query, device), on_device(d_key, device), on_device(d_value, device), Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", &empty);
    m.impl("empty_strided", &empty_strided);
    m.impl("_copy_from", &copy_from);
    m.impl("_copy_from_and_resize", &copy_from_and_resize);
    m.impl("_local_scalar_dense", &local_scalar);
    m.impl("resize_", &resize);
    m.impl("set_.source_Storage", &set_storage);
    m.impl("set_.source_Storage_storage_offset", &set_window);
    m.impl("set_.source_Tensor", &set_tensor);
    m.impl("set_", &set_nothing);
    m.impl("_has_compatible_shallow_copy_type", &is_exchangeable);
    m.impl("record_stream", &record_stream);
    m.impl("_softmax", &softmax<&at::_softmax>);
    m.impl("_log_softmax", &softmax<&at::_log_softmax>);
    m.impl("_softmax_backward_data", &softmax_backward<&at::_softmax_backward_data>);
    m.impl("_log_softmax_backward_data", &softmax_backward<&at::_log_softmax_backward_data>);
    m.impl("_scaled_dot_product_fused_attention_overrideable", &attention);
    m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attention_backward);
}

// A copy does these itself; torch's general way for them is a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
    m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
    m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

} // namespace
} // namespace standin

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &standin::attention_choice)
}
