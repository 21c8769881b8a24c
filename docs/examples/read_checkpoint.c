/* Reads one tensor of a checkpoint with the C library of HDF5, and prints its shape, dtype, and the sum of its elements.
 *
 *     h5cc -shlib -o read_checkpoint read_checkpoint.c
 *     ./read_checkpoint save_dir/global_step500/model.h5 params/embed.weight/master
 *
 * HDF5 has no bfloat16: such tensors are unsigned integers of 16 bits, the upper half of a float, and have an attribute
 * "dtype". Other numbers HDF5 converts to double by itself.
 */
#include <hdf5.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LONGEST 64

/* The attribute "dtype" of a dataset, a text of fixed length; "" if it has none. */
static void read_dtype(hid_t dataset, char dtype[LONGEST])
{
    memset(dtype, 0, LONGEST);
    if (H5Aexists(dataset, "dtype") <= 0)
        return;
    hid_t attribute = H5Aopen(dataset, "dtype", H5P_DEFAULT);
    hid_t type = H5Aget_type(attribute);
    if (H5Tget_class(type) == H5T_STRING && !H5Tis_variable_str(type) && H5Tget_size(type) < LONGEST)
        H5Aread(attribute, type, dtype);
    H5Tclose(type);
    H5Aclose(attribute);
}

static double from_bfloat16(uint16_t bits)
{
    uint32_t whole = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &whole, sizeof value);
    return value;
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: %s FILE DATASET\n", argv[0]);
        return 2;
    }
    hid_t file = H5Fopen(argv[1], H5F_ACC_RDONLY, H5P_DEFAULT);
    hid_t dataset = file < 0 ? -1 : H5Dopen(file, argv[2], H5P_DEFAULT); /* follows links to the data files */
    if (dataset < 0)
        return 1; /* HDF5 has said why */
    hid_t space = H5Dget_space(dataset);
    hssize_t count = H5Sget_simple_extent_npoints(space);
    hsize_t shape[H5S_MAX_RANK];
    int dims = H5Sget_simple_extent_dims(space, shape, NULL);
    char dtype[LONGEST];
    read_dtype(dataset, dtype);
    int is_bfloat16 = strcmp(dtype, "bfloat16") == 0;
    if (dtype[0] && !is_bfloat16) {
        fprintf(stderr, "%s is of %s, which this program does not know\n", argv[2], dtype);
        return 1;
    }

    double sum = 0;
    size_t itemsize = is_bfloat16 ? sizeof(uint16_t) : sizeof(double);
    void *elements = malloc(count > 0 ? (size_t)count * itemsize : 1);
    hid_t wanted = is_bfloat16 ? H5T_NATIVE_UINT16 : H5T_NATIVE_DOUBLE;
    if (!elements || H5Dread(dataset, wanted, H5S_ALL, H5S_ALL, H5P_DEFAULT, elements) < 0)
        return 1;
    for (hssize_t place = 0; place < count; ++place)
        sum += is_bfloat16 ? from_bfloat16(((uint16_t *)elements)[place]) : ((double *)elements)[place];

    printf("%s: %s, shape", argv[2], is_bfloat16 ? "bfloat16" : "numbers");
    for (int dim = 0; dim < dims; ++dim)
        printf(" %llu", (unsigned long long)shape[dim]);
    printf(", sum %.17g\n", sum);

    free(elements);
    H5Sclose(space);
    H5Dclose(dataset);
    H5Fclose(file);
    return 0;
}
