"""Numbers of channels: closed ones are given free, so that many engines in one process take no more than one."""

from mpispeed.mesh.mesh import Mesh, Topology
from mpispeed.mesh.sim import run


def test_numbers_of_closed_meshes_are_taken_again():
    def body(world):
        found = []
        keeper = Mesh(Topology({"data": 2}), world)
        for _ in range(3):
            mesh = Mesh(Topology({"data": 2}), world)
            mesh.channel("grads")
            mesh.channel("params")
            found.append([channel.number for channel in world.channels])
            mesh.close()
        keeper.close()
        return found, [channel.number for channel in world.channels]

    for found, left in run(2, body):
        assert found == [[0, 1, 2, 3, 4]] * 3
        assert left == [0]
