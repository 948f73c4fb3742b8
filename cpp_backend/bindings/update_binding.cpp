#include "bindings/update_binding.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings/parameters_binding.h"
#include "bindings/shm_binding.h"
#include "update/agreement.h"
#include "update/apply.h"
#include "update/compress.h"
#include "update/merge.h"
#include "update/sharded.h"
#include "update/update.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace tagi_ddp {
namespace {

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check_compressed(const Floats& values, int bits, const Bytes& bytes) {
    if (bits != 8 && bits != 16) throw std::invalid_argument("bits must be 8 or 16");
    if (values.size() % compress_block != 0 ||
        bytes.size() != compressed_bytes(values.size(), bits)) {
        throw std::invalid_argument("expected whole blocks of floats, and bytes for all of them");
    }
}

}  // namespace

void bind_update(nb::module_& module) {
    module.attr("LEAST_VARIANCE") = least_variance;
    module.attr("LEAST_PRECISION_KEPT") = least_precision_kept;
    nb::list factors;
    for (const CapFactor& entry : cap_factors) {
        factors.append(nb::make_tuple(entry.smallest_batch, entry.factor));
    }
    module.attr("CAP_FACTORS") = nb::tuple(factors);
    module.def("cap_factor", &cap_factor, "batch"_a, "The engine's cap factor for a batch size.");

    nb::class_<Contribution>(module, "Contribution", "What one rank brings to a step.")
        .def(
            "__init__",
            [](Contribution* self, int64_t batch, bool finite, bool finished) {
                new (self) Contribution{batch, finite, finished};
            },
            "batch"_a, "finite"_a = true, "finished"_a = false)
        .def_ro("batch", &Contribution::batch)
        .def_ro("finite", &Contribution::finite)
        .def_ro("finished", &Contribution::finished);
    nb::class_<Agreement>(module, "Agreement", "What all ranks agreed on for a step.")
        .def(nb::init<const std::vector<Contribution>&>(), "ranks"_a)
        .def_ro("batch", &Agreement::batch)
        .def_ro("active", &Agreement::active)
        .def_ro("not_finite", &Agreement::not_finite)
        .def_ro("all_finished", &Agreement::all_finished)
        .def_prop_ro("applies", &Agreement::applies)
        .def("divisor", &Agreement::divisor, "average"_a)
        .def("cap", &Agreement::cap, "average"_a);
    module.def(
        "update",
        [](PyShmCommunicator& communicator, const Parameters& parameters,
           const Contribution& contribution, bool average) {
            Agreement agreement{{}};
            const double timeout = communicator.timeout();
            communicator.run_collective("step", [&] {
                agreement = update(communicator.get(), parameters, contribution, average, timeout);
            });
            return agreement;
        },
        "communicator"_a, "parameters"_a, "contribution"_a, "average"_a,
        "Exchange, cap and apply the deltas over shared memory.");
    module.def(
        "update_sharded",
        [](PyShmCommunicator& communicator, const Parameters& parameters, Floats bucket,
           const Contribution& contribution, bool average) {
            float* data = checked(parameters, bucket);
            Agreement agreement{{}};
            const double timeout = communicator.timeout();
            communicator.run_collective("sharded_step", [&] {
                agreement = update_sharded(communicator.get(), parameters, data, contribution,
                                           average, timeout);
            });
            return agreement;
        },
        "communicator"_a, "parameters"_a, "bucket"_a, "contribution"_a, "average"_a,
        "Exchange, cap and apply the bucket's deltas over shared memory, each rank its part. The "
        "bucket is of the communicator's own memory.");
    module.attr("COMPRESS_BLOCK") = compress_block;
    module.def("compressed_bytes", &compressed_bytes, "count"_a, "bits"_a,
               "The bytes of so many floats, a multiple of COMPRESS_BLOCK, in 8 or 16 bits.");
    module.def(
        "compress",
        [](Floats values, int bits, Bytes out) {
            check_compressed(values, bits, out);
            nb::gil_scoped_release unlocked;
            compress(values.data(), values.size(), bits, out.data());
        },
        "values"_a, "bits"_a, "out"_a,
        "Write floats in 8 or 16 bits each; they are left with what that has dropped.");
    module.def(
        "add_decompressed",
        [](Bytes bytes, int bits, Floats values) {
            check_compressed(values, bits, bytes);
            nb::gil_scoped_release unlocked;
            add_decompressed(bytes.data(), values.size(), bits, values.data());
        },
        "bytes"_a, "bits"_a, "values"_a, "Add what compress has written to values.");
    module.def(
        "shards",
        [](size_t size, int ranks) {
            std::vector<std::pair<size_t, size_t>> result;
            for (int r = 0; r < ranks; ++r) {
                const Shard shard = shard_of(size, sizeof(float), r, ranks);
                result.emplace_back(shard.begin, shard.count);
            }
            return result;
        },
        "size"_a, "ranks"_a, "The (begin, count) of each rank's part of the parameters.");
}

}  // namespace tagi_ddp
