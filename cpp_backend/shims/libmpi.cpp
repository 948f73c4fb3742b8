// A stand-in for Open MPI's libmpi.so.40 on hosts without Open MPI: the symbols that the engine is
// linked to. It has no MPI_Get_version, so a program that looks for an MPI does not take it for
// one.

extern "C" {

// The engine only uses the addresses of these objects of Open MPI.
char ompi_mpi_byte[1024];
char ompi_mpi_comm_null[1024];
char ompi_mpi_comm_world[1024];

__attribute__((visibility("hidden"))) int not_available() noexcept {
    return 16;  // Open MPI's MPI_ERR_OTHER
}

int MPI_Initialized(int* flag) {
    *flag = 0;
    return 0;
}

#define STAND_IN(name) int name() noexcept __attribute__((alias("not_available")))

STAND_IN(MPI_Abort);
STAND_IN(MPI_Accumulate);
STAND_IN(MPI_Allgather);
STAND_IN(MPI_Allgatherv);
STAND_IN(MPI_Allreduce);
STAND_IN(MPI_Alltoall);
STAND_IN(MPI_Alltoallv);
STAND_IN(MPI_Alltoallw);
STAND_IN(MPI_Barrier);
STAND_IN(MPI_Bcast);
STAND_IN(MPI_Bsend);
STAND_IN(MPI_Bsend_init);
STAND_IN(MPI_Cancel);
STAND_IN(MPI_Cart_coords);
STAND_IN(MPI_Cart_create);
STAND_IN(MPI_Cart_get);
STAND_IN(MPI_Cart_map);
STAND_IN(MPI_Cart_rank);
STAND_IN(MPI_Cart_shift);
STAND_IN(MPI_Cart_sub);
STAND_IN(MPI_Cartdim_get);
STAND_IN(MPI_Comm_accept);
STAND_IN(MPI_Comm_connect);
STAND_IN(MPI_Comm_create);
STAND_IN(MPI_Comm_delete_attr);
STAND_IN(MPI_Comm_disconnect);
STAND_IN(MPI_Comm_dup);
STAND_IN(MPI_Comm_free);
STAND_IN(MPI_Comm_get_attr);
STAND_IN(MPI_Comm_get_errhandler);
STAND_IN(MPI_Comm_get_name);
STAND_IN(MPI_Comm_group);
STAND_IN(MPI_Comm_rank);
STAND_IN(MPI_Comm_remote_group);
STAND_IN(MPI_Comm_remote_size);
STAND_IN(MPI_Comm_set_attr);
STAND_IN(MPI_Comm_set_errhandler);
STAND_IN(MPI_Comm_set_name);
STAND_IN(MPI_Comm_size);
STAND_IN(MPI_Comm_spawn);
STAND_IN(MPI_Comm_spawn_multiple);
STAND_IN(MPI_Comm_split);
STAND_IN(MPI_Comm_test_inter);
STAND_IN(MPI_Errhandler_free);
STAND_IN(MPI_Exscan);
STAND_IN(MPI_Gather);
STAND_IN(MPI_Gatherv);
STAND_IN(MPI_Get);
STAND_IN(MPI_Get_count);
STAND_IN(MPI_Get_elements);
STAND_IN(MPI_Graph_create);
STAND_IN(MPI_Graph_get);
STAND_IN(MPI_Graph_map);
STAND_IN(MPI_Graph_neighbors);
STAND_IN(MPI_Graph_neighbors_count);
STAND_IN(MPI_Graphdims_get);
STAND_IN(MPI_Grequest_complete);
STAND_IN(MPI_Group_excl);
STAND_IN(MPI_Group_free);
STAND_IN(MPI_Group_incl);
STAND_IN(MPI_Group_range_excl);
STAND_IN(MPI_Group_range_incl);
STAND_IN(MPI_Group_rank);
STAND_IN(MPI_Group_size);
STAND_IN(MPI_Ibsend);
STAND_IN(MPI_Info_delete);
STAND_IN(MPI_Info_dup);
STAND_IN(MPI_Info_free);
STAND_IN(MPI_Info_get);
STAND_IN(MPI_Info_get_nkeys);
STAND_IN(MPI_Info_get_nthkey);
STAND_IN(MPI_Info_get_valuelen);
STAND_IN(MPI_Info_set);
STAND_IN(MPI_Intercomm_create);
STAND_IN(MPI_Intercomm_merge);
STAND_IN(MPI_Iprobe);
STAND_IN(MPI_Irecv);
STAND_IN(MPI_Irsend);
STAND_IN(MPI_Isend);
STAND_IN(MPI_Issend);
STAND_IN(MPI_Op_commutative);
STAND_IN(MPI_Op_create);
STAND_IN(MPI_Op_free);
STAND_IN(MPI_Pack);
STAND_IN(MPI_Pack_external);
STAND_IN(MPI_Pack_external_size);
STAND_IN(MPI_Pack_size);
STAND_IN(MPI_Probe);
STAND_IN(MPI_Put);
STAND_IN(MPI_Recv);
STAND_IN(MPI_Recv_init);
STAND_IN(MPI_Reduce);
STAND_IN(MPI_Reduce_local);
STAND_IN(MPI_Reduce_scatter);
STAND_IN(MPI_Request_free);
STAND_IN(MPI_Request_get_status);
STAND_IN(MPI_Rsend);
STAND_IN(MPI_Rsend_init);
STAND_IN(MPI_Scan);
STAND_IN(MPI_Scatter);
STAND_IN(MPI_Scatterv);
STAND_IN(MPI_Send);
STAND_IN(MPI_Send_init);
STAND_IN(MPI_Sendrecv);
STAND_IN(MPI_Sendrecv_replace);
STAND_IN(MPI_Ssend);
STAND_IN(MPI_Ssend_init);
STAND_IN(MPI_Start);
STAND_IN(MPI_Status_set_cancelled);
STAND_IN(MPI_Status_set_elements);
STAND_IN(MPI_Test);
STAND_IN(MPI_Test_cancelled);
STAND_IN(MPI_Topo_test);
STAND_IN(MPI_Type_commit);
STAND_IN(MPI_Type_contiguous);
STAND_IN(MPI_Type_create_darray);
STAND_IN(MPI_Type_create_hindexed);
STAND_IN(MPI_Type_create_hvector);
STAND_IN(MPI_Type_create_indexed_block);
STAND_IN(MPI_Type_create_resized);
STAND_IN(MPI_Type_create_subarray);
STAND_IN(MPI_Type_delete_attr);
STAND_IN(MPI_Type_dup);
STAND_IN(MPI_Type_get_attr);
STAND_IN(MPI_Type_get_contents);
STAND_IN(MPI_Type_get_envelope);
STAND_IN(MPI_Type_get_extent);
STAND_IN(MPI_Type_get_name);
STAND_IN(MPI_Type_get_true_extent);
STAND_IN(MPI_Type_indexed);
STAND_IN(MPI_Type_set_attr);
STAND_IN(MPI_Type_set_name);
STAND_IN(MPI_Type_size);
STAND_IN(MPI_Type_vector);
STAND_IN(MPI_Unpack);
STAND_IN(MPI_Unpack_external);
STAND_IN(MPI_Wait);
STAND_IN(MPI_Win_call_errhandler);
STAND_IN(MPI_Win_complete);
STAND_IN(MPI_Win_delete_attr);
STAND_IN(MPI_Win_fence);
STAND_IN(MPI_Win_get_errhandler);
STAND_IN(MPI_Win_get_group);
STAND_IN(MPI_Win_get_name);
STAND_IN(MPI_Win_lock);
STAND_IN(MPI_Win_post);
STAND_IN(MPI_Win_set_attr);
STAND_IN(MPI_Win_set_errhandler);
STAND_IN(MPI_Win_set_name);
STAND_IN(MPI_Win_start);
STAND_IN(MPI_Win_test);
STAND_IN(MPI_Win_unlock);
STAND_IN(MPI_Win_wait);

}  // extern "C"
