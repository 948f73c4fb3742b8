#include "bindings/parameters_binding.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "update/adaptive_sum.h"
#include "update/merge.h"
#include "update/sharded.h"
#include "update/statistics.h"
#include "update/update.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace tagi_ddp {
namespace {

Block as_block(const Floats& mu, const Floats& var, const Floats& delta_mu,
               const Floats& delta_var) {
    if (var.size() != mu.size() || delta_mu.size() != mu.size() || delta_var.size() != mu.size()) {
        throw std::invalid_argument("means, variances and deltas must have equal sizes");
    }
    return {mu.data(), var.data(), delta_mu.data(), delta_var.data(), mu.size(), nullptr};
}

Shard checked_shard(const Parameters& parameters, const Floats& gaussians, size_t begin) {
    const Shard shard{begin, gaussians.size() / 2};
    if (gaussians.size() % 2 != 0 || begin > parameters.size() ||
        shard.count > parameters.size() - begin) {
        throw std::invalid_argument("no such range of parameters");
    }
    return shard;
}

}  // namespace

float* checked(const Parameters& parameters, const Floats& bucket) {
    if (bucket.size() != 2 * parameters.size()) {
        throw std::invalid_argument("bucket has " + std::to_string(bucket.size()) +
                                    " floats, expected " + std::to_string(2 * parameters.size()));
    }
    return bucket.data();
}

void bind_parameters(nb::module_& module) {
    nb::class_<Parameters>(
        module, "Parameters",
        "The parameters of a replica as one flat sequence, in its layers' memory.")
        .def(nb::init<>())
        .def(
            "add_engine_layer",
            [](Parameters& self, const std::string& name, uintptr_t address) {
                self.add_engine_layer(name, reinterpret_cast<EngineLayer*>(address));
            },
            "name"_a, "address"_a, "A layer at a verified address of the engine's memory.")
        .def(
            "add_layer",
            [](Parameters& self, const std::string& name, const std::vector<Floats>& weights,
               const std::vector<Floats>& biases, nb::ndarray<int32_t, nb::shape<1>> counter) {
                if (weights.size() != 4 || biases.size() != 4) {
                    throw std::invalid_argument("expected mu, var, delta_mu and delta_var");
                }
                Block w = as_block(weights[0], weights[1], weights[2], weights[3]);
                w.neg_var_counter = counter.data();
                self.add_layer(name, w, as_block(biases[0], biases[1], biases[2], biases[3]));
            },
            "name"_a, "weights"_a, "biases"_a, "counter"_a,
            "A layer in arrays that the caller keeps: (mu, var, delta_mu, delta_var) of the "
            "weights "
            "and of the biases, float32, and an int32 array that counts negative variances.")
        .def("refresh", &Parameters::refresh,
             "Find the layers' memory again; call before each use.")
        .def_prop_ro("version", &Parameters::version,
                     "Changes whenever refresh finds the layers' memory elsewhere.")
        .def(
            "place_deltas",
            [](Parameters& self, Floats bucket) { self.place_deltas(checked(self, bucket)); },
            "bucket"_a, nb::keep_alive<1, 2>(),
            "Let the deltas lie in bucket, [means | variances], from now on; not in the layers.")
        .def_prop_ro(
            "blocks",
            [](const Parameters& self) {
                nb::list result;
                for (size_t i = 0; i < self.blocks().size(); ++i)
                    result.append(nb::make_tuple(self.offsets()[i], self.blocks()[i].count));
                return result;
            },
            "(offset, count) of each layer's weights and biases in the flat sequence.")
        .def_prop_ro("size", &Parameters::size)
        .def(
            "first_not_finite",
            [](const Parameters& self, size_t begin, std::optional<size_t> end) {
                const size_t last = end.value_or(self.size());
                if (begin > last || last > self.size())
                    throw std::invalid_argument("no such range of parameters");
                nb::gil_scoped_release unlocked;
                return self.first_not_finite(begin, last - begin);
            },
            "begin"_a = 0, "end"_a = nb::none(),
            "The name of the first layer with a delta in the flat range that is NaN or infinite, "
            "or \"\".")
        .def_prop_ro("negative_variances", &Parameters::negative_variances,
                     "How many variances of each layer's weights the last step found not positive.")
        .def(
            "add_deltas_to",
            [](const Parameters& self, Floats sums, const std::vector<bool>& layers) {
                float* data = checked(self, sums);
                nb::gil_scoped_release unlocked;
                self.add_deltas_to(data, layers);
            },
            "sums"_a, "layers"_a)
        .def(
            "add_to_deltas",
            [](const Parameters& self, Floats sums, const std::vector<bool>& layers) {
                const float* data = checked(self, sums);
                nb::gil_scoped_release unlocked;
                self.add_to_deltas(data, layers);
            },
            "sums"_a, "layers"_a)
        .def(
            "pack",
            [](const Parameters& self, Floats bucket) {
                float* data = checked(self, bucket);
                nb::gil_scoped_release unlocked;
                pack(self, 0, self.size(), data, self.size());
            },
            "bucket"_a, "Write the deltas to bucket: [means | variances].")
        .def(
            "apply",
            [](const Parameters& self, Floats bucket, float divisor, float cap) {
                const float* data = checked(self, bucket);
                nb::gil_scoped_release unlocked;
                apply(self, data, divisor, cap);
            },
            "bucket"_a, "divisor"_a, "cap"_a, "Cap and apply the bucket's deltas.")
        .def(
            "pack_shard",
            [](const Parameters& self, Floats bucket, size_t begin) {
                const Shard shard = checked_shard(self, bucket, begin);
                nb::gil_scoped_release unlocked;
                pack(self, shard.begin, shard.count, bucket.data(), shard.count);
            },
            "bucket"_a, "begin"_a,
            "Write the deltas of the flat range that begins there to bucket: [means | variances].")
        .def(
            "apply_shard",
            [](const Parameters& self, Floats gaussians, size_t begin, float divisor, float cap) {
                const Shard shard = checked_shard(self, gaussians, begin);
                nb::gil_scoped_release unlocked;
                apply_shard(self, shard, gaussians.data(), divisor, cap);
            },
            "gaussians"_a, "begin"_a, "divisor"_a, "cap"_a,
            "Cap and apply the deltas of the flat range that begins there, and replace them by the "
            "posterior, for take_shard.")
        .def(
            "take_shard",
            [](const Parameters& self, Floats gaussians, size_t begin) {
                const Shard shard = checked_shard(self, gaussians, begin);
                nb::gil_scoped_release unlocked;
                take_shard(self, shard, gaussians.data());
            },
            "gaussians"_a, "begin"_a,
            "Replace the flat range that begins there by another rank's posterior.")
        .def(
            "apply_own", [](const Parameters& self, float cap) { return apply_own(self, cap); },
            "cap"_a, nb::call_guard<nb::gil_scoped_release>(),
            "Cap and apply the deltas where they are. If one is NaN or infinite do nothing, and "
            "return the name of its layer; else \"\".")
        .def(
            "read_posterior",
            [](const Parameters& self, Floats gaussians) {
                float* data = checked(self, gaussians);
                nb::gil_scoped_release unlocked;
                self.read_posterior(data);
            },
            "gaussians"_a, "Copy means and variances to gaussians: [means | variances].")
        .def(
            "write_posterior",
            [](const Parameters& self, Floats gaussians) {
                const float* data = checked(self, gaussians);
                nb::gil_scoped_release unlocked;
                self.write_posterior(data);
            },
            "gaussians"_a, "Replace means and variances: [means | variances].")
        .def(
            "change_since",
            [](const Parameters& self, Floats now, Floats before, Floats change) {
                const float* from = checked(self, before);
                const float* to = checked(self, now);
                float* out = checked(self, change);
                nb::gil_scoped_release unlocked;
                change_since(to, from, out, self.size());
            },
            "now"_a, "before"_a, "change"_a,
            "Write how Gaussians came from others to change: [precisions | weighted means].")
        .def(
            "add_change",
            [](const Parameters& self, Floats gaussians, Floats reference, Floats change,
               std::optional<Floats> own) {
                float* data = checked(self, gaussians);
                const float* means = checked(self, reference);
                const float* sum = checked(self, change);
                const float* less = own ? checked(self, *own) : nullptr;
                nb::gil_scoped_release unlocked;
                return add_change(self, data, means, sum, less);
            },
            "gaussians"_a, "reference"_a, "change"_a, "own"_a = nb::none(),
            "Multiply gaussians by change less own, both relative to the means of reference. "
            "Returns how many parameters of each layer took only a part of it.");

    nb::class_<AdaptiveSum>(module, "AdaptiveSum",
                            "Sums of changes, damped where ranks agree; see adaptive_sum.h.")
        .def(nb::init<const Parameters&>(), "parameters"_a)
        .def_ro_static("BLOCK", &AdaptiveSum::block_floats)
        .def_ro_static("LEEWAY", &AdaptiveSum::leeway)
        .def_ro_static("REGAINED", &AdaptiveSum::regained)
        .def_ro_static("SURPRISE", &AdaptiveSum::surprise)
        .def_prop_ro("described", &AdaptiveSum::described, "How many numbers describe a change.")
        .def(
            "describe",
            [](const AdaptiveSum& self, Floats change, Floats before, double steps,
               Floats description) {
                self.check(change.size(), before.size(), description.size());
                nb::gil_scoped_release unlocked;
                self.describe(change.data(), before.data(), steps, description.data());
            },
            "change"_a, "before"_a, "steps"_a, "description"_a,
            "Describe a rank's change in so many steps since before: by block, the square of its "
            "weighted half; and the steps.")
        .def(
            "damp",
            [](AdaptiveSum& self, Floats change, Floats before, Floats description, int ranks) {
                if (ranks < 1) throw std::invalid_argument("ranks must be at least 1");
                self.check(change.size(), before.size(), description.size());
                nb::gil_scoped_release unlocked;
                return self.damp(change.data(), before.data(), description.data(), ranks);
            },
            "change"_a, "before"_a, "description"_a, "ranks"_a,
            "Damp the sum of the changes of so many ranks, and so is description that of theirs. "
            "Returns by layer how far the ranks agree: 0 orthogonal, 1 the same.")
        .def("restart", &AdaptiveSum::restart, "Forget the sums before.")
        .def_prop_ro(
            "previous",
            [](AdaptiveSum& self) {
                return nb::ndarray<nb::numpy, float, nb::ndim<1>>(self.previous().data(),
                                                                  {self.previous().size()});
            },
            nb::rv_policy::reference_internal, "The weighted half of the sum before, to change.")
        .def_prop_ro(
            "trust",
            [](AdaptiveSum& self) {
                return nb::ndarray<nb::numpy, double, nb::ndim<1>>(self.trust().data(),
                                                                   {self.trust().size()});
            },
            nb::rv_policy::reference_internal, "By block, how far sums are trusted, to change.");

    nb::class_<RunningStatistics>(module, "RunningStatistics",
                                  "The running statistics of all batch normalization layers.")
        .def(nb::init<>())
        .def(
            "add_engine_layer",
            [](RunningStatistics& self, uintptr_t address) {
                self.add(reinterpret_cast<EngineBatchNorm*>(address));
            },
            "address"_a)
        .def_prop_ro("size", &RunningStatistics::size)
        .def(
            "pack",
            [](const RunningStatistics& self, Floats out, float weight) {
                if (out.size() != self.size())
                    throw std::invalid_argument("out has the wrong size");
                self.pack(out.data(), weight);
            },
            "out"_a, "weight"_a)
        .def(
            "unpack",
            [](const RunningStatistics& self, Floats values, float total) {
                if (values.size() != self.size())
                    throw std::invalid_argument("values has the wrong size");
                self.unpack(values.data(), total);
            },
            "values"_a, "total"_a);
}

}  // namespace tagi_ddp
