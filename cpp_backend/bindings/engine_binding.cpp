#include "bindings/engine_binding.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/cuda_layout.h"
#include "engine/layer_layout.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace tagi_ddp {
namespace {

EngineLayer* layer_at(uintptr_t address) { return reinterpret_cast<EngineLayer*>(address); }

std::vector<float>& vector_of(EngineLayer& layer, const std::string& name) {
    using Field = std::vector<float> EngineLayer::*;
    constexpr std::pair<const char*, Field> fields[] = {
        {"mu_w", &EngineLayer::mu_w},
        {"var_w", &EngineLayer::var_w},
        {"mu_b", &EngineLayer::mu_b},
        {"var_b", &EngineLayer::var_b},
        {"delta_mu_w", &EngineLayer::delta_mu_w},
        {"delta_var_w", &EngineLayer::delta_var_w},
        {"delta_mu_b", &EngineLayer::delta_mu_b},
        {"delta_var_b", &EngineLayer::delta_var_b},
    };
    for (const auto& [known, field] : fields) {
        if (name == known) return layer.*field;
    }
    throw std::invalid_argument("a layer has no vector " + name);
}

// The engine's memory in place; valid until the engine replaces it.
template <typename T>
nb::object view(T* data, size_t size) {
    return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(data, {size}, nb::handle()),
                    nb::rv_policy::reference);
}

nb::object view(std::vector<float>& values) { return view(values.data(), values.size()); }

void bind_host_layers(nb::module_& module) {
    nb::class_<EngineLayer>(module, "EngineLayer",
                            "The memory of one engine layer, looked at through its address.")
        .def_prop_ro("input_size", [](const EngineLayer& l) { return l.input_size; })
        .def_prop_ro("output_size", [](const EngineLayer& l) { return l.output_size; })
        .def_prop_ro("num_weights", [](const EngineLayer& l) { return l.num_weights; })
        .def_prop_ro("num_biases", [](const EngineLayer& l) { return l.num_biases; })
        .def_prop_ro("in_width", [](const EngineLayer& l) { return l.in_width; })
        .def_prop_ro("in_height", [](const EngineLayer& l) { return l.in_height; })
        .def_prop_ro("in_channels", [](const EngineLayer& l) { return l.in_channels; })
        .def_prop_ro("out_width", [](const EngineLayer& l) { return l.out_width; })
        .def_prop_ro("out_height", [](const EngineLayer& l) { return l.out_height; })
        .def_prop_ro("out_channels", [](const EngineLayer& l) { return l.out_channels; })
        .def_prop_ro("bias", [](const EngineLayer& l) { return l.bias; })
        .def_prop_ro("device_idx", [](const EngineLayer& l) { return l.device_idx; })
        .def_prop_ro("num_threads", [](const EngineLayer& l) { return l.num_threads; })
        .def_prop_ro("training", [](const EngineLayer& l) { return l.training; })
        .def_prop_ro(
            "neg_var_w_counter", [](EngineLayer& l) { return view(&l.neg_var_w_counter, 1); },
            "A view of the counter of negative variances, int32.")
        .def(
            "vector",
            [](EngineLayer& l, const std::string& name) { return view(vector_of(l, name)); },
            "name"_a, "A view of mu_w, var_w, mu_b, var_b or their delta_...; float32.");
    module.def(
        "engine_layer", [](uintptr_t address) { return layer_at(address); }, "address"_a,
        nb::rv_policy::reference, "The layer at a verified address.");

    module.def(
        "batch_norm_statistics",
        [](uintptr_t address) {
            auto* norm = reinterpret_cast<EngineBatchNorm*>(address);
            // The flag says that the next batch replaces the statistics.
            auto* flag = reinterpret_cast<uint8_t*>(&norm->first_batch);
            return nb::make_tuple(view(norm->mu_ra), view(norm->var_ra), norm->epsilon,
                                  norm->momentum, view(flag, 1));
        },
        "address"_a,
        "A batch normalization layer: views of its running means and variances, epsilon, momentum, "
        "and a view of its flag for the first batch.");
    module.def(
        "hidden_states",
        [](uintptr_t address) {
            auto* states = reinterpret_cast<EngineHiddenStates*>(address);
            return nb::make_tuple(view(states->mu_a), view(states->var_a), view(states->jcb));
        },
        "address"_a, "Hidden states: views of their means, variances and jacobians.");
    module.def(
        "delta_states",
        [](uintptr_t address) {
            auto* states = reinterpret_cast<EngineDeltaStates*>(address);
            return nb::make_tuple(view(states->delta_mu), view(states->delta_var));
        },
        "address"_a, "Delta states: views of their means and variances.");
}

void bind_cuda_layers(nb::module_& module) {
    module.def("classes_at", &classes_at, "address"_a,
               "The names of the class of the object at an address and of its bases, one a level; "
               "empty if there is no object of a class that a library exports.");
    module.def(
        "layers_in_block",
        [](uintptr_t address) {
            const auto& layers = reinterpret_cast<EngineLayerBlock*>(address)->layers;
            std::vector<uintptr_t> addresses;
            addresses.reserve(layers.size());
            for (const auto& pointer : layers)
                addresses.push_back(reinterpret_cast<uintptr_t>(pointer.layer));
            return addresses;
        },
        "address"_a, "The addresses of the layers of a LayerBlock.");
    module.def(
        "layers_in_cuda_resnet_block",
        [](uintptr_t address) {
            const auto* block = reinterpret_cast<EngineCudaResNetBlock*>(address);
            return nb::make_tuple(reinterpret_cast<uintptr_t>(block->main_block.layer),
                                  reinterpret_cast<uintptr_t>(block->shortcut.layer));
        },
        "address"_a, "The addresses of a ResNetBlockCuda's main block and shortcut; 0: none.");
    module.def(
        "cuda_layer_pointers",
        [](uintptr_t address) {
            const auto* layer = reinterpret_cast<EngineCudaLayer*>(address);
            std::vector<uintptr_t> pointers;
            for (float* pointer : layer->parameters)
                pointers.push_back(reinterpret_cast<uintptr_t>(pointer));
            for (float* pointer : layer->deltas)
                pointers.push_back(reinterpret_cast<uintptr_t>(pointer));
            return pointers;
        },
        "address"_a,
        "Where a CUDA layer's mu_w, var_w, mu_b, var_b and their deltas lie on the device.");
    module.def(
        "cuda_batch_norm_statistics",
        [](uintptr_t address) {
            auto* norm = reinterpret_cast<EngineCudaBatchNorm*>(address);
            auto* flag = reinterpret_cast<uint8_t*>(&norm->first_batch);
            return nb::make_tuple(view(norm->mu_ra), view(norm->var_ra), view(flag, 1),
                                  reinterpret_cast<uintptr_t>(norm->device_mu_ra),
                                  reinterpret_cast<uintptr_t>(norm->device_var_ra));
        },
        "address"_a,
        "A BatchNorm2dCuda: views of its running means and variances on the host and of its flag "
        "for the first batch, and where the running means and variances lie on the device.");
}

}  // namespace

void bind_engine(nb::module_& module) {
    bind_host_layers(module);
    bind_cuda_layers(module);
}

}  // namespace tagi_ddp
